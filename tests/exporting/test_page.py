"""Pages: what is in the folder, the engine and where it comes from, refusals."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from shared_fixtures import Command, Forbid, assert_refused

from tscompress.errors import DownloadError, OutputExistsError, UsageError
from tscompress.exporting.page import engine as engines
from tscompress.exporting.page.bundle import PAGE_RECORD, write_page
from tscompress.exporting.page.engine import Engine, find_engine, registry
from tscompress.io.files import cache_directory, check_output
from tscompress.runtime.chronos2 import Chronos2Forecaster
from tscompress.runtime.load import load
from tscompress.runtime.record import GRAPH_FILE
from tscompress.runtime.univariate import UnivariateForecaster

ENGINE = Engine(b"const ort = 1;", b"export default 2;", b"\0asm")
MEMBERS = {
    "ort.wasm.min.js": ENGINE.script,
    "ort-wasm-simd-threaded.mjs": ENGINE.module,
    "ort-wasm-simd-threaded.wasm": ENGINE.wasm,
    "unused.js": b"throw 1;",
}


def integrity_of(content: bytes) -> str:
    return f"sha512-{base64.b64encode(hashlib.sha512(content).digest()).decode()}"


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A package of the registry with a small engine, in the place of the pinned one."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as package:
        for name, content in MEMBERS.items():
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    content = stream.getvalue()
    monkeypatch.setattr(engines, "INTEGRITY", integrity_of(content))
    return content


class Registry:
    """Answers of a registry, and what it was asked for."""

    def __init__(self, content: bytes, status: int = 200) -> None:
        self.content, self.status = content, status
        self.asked: list[str] = []


@pytest.fixture
def server(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Registry]:  # fmt: skip
    found = Registry(archive)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            self.send_response(found.status)
            self.end_headers()
            self.wfile.write(found.content if found.status == 200 else b"")

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{http.server_port}/npm")
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    yield found
    http.shutdown()
    http.server_close()


# --------------------------------------------------------------------------------------------------
# The engine
# --------------------------------------------------------------------------------------------------


def test_engine_is_fetched_once(server: Registry) -> None:
    assert find_engine() == find_engine() == ENGINE
    assert server.asked == [f"/npm/onnxruntime-web/-/onnxruntime-web-{engines.VERSION}.tgz"]


def test_cached_engine_that_was_changed_is_fetched_again(server: Registry) -> None:
    find_engine()
    (kept,) = (cache_directory() / "downloads").iterdir()
    kept.write_bytes(b"other")
    assert find_engine() == ENGINE
    assert len(server.asked) == 2


@pytest.mark.parametrize("change", ["content", "size", "status"])
def test_another_engine_is_refused_and_not_kept(
    server: Registry, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "content":
        server.content += b" "
    elif change == "size":
        monkeypatch.setattr("tscompress.exporting.page.engine._LIMIT_BYTES", 10)
    else:
        server.status = 404
    with pytest.raises(DownloadError, match="npm pack") as refusal:
        find_engine()
    assert "127.0.0.1" in str(refusal.value)
    assert not (cache_directory() / "downloads").exists()


def test_registry_that_fails_for_a_moment_is_asked_again(
    server: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recover(seconds: float) -> None:
        server.status = 200

    monkeypatch.setattr("tscompress.io.network.time.sleep", recover)
    server.status = 503
    assert find_engine() == ENGINE
    assert len(server.asked) == 2


def test_engine_without_a_network_is_refused_in_one_line(
    archive: bytes, checkpoints: dict[str, Path], tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch, forbid: Forbid,
) -> None:  # fmt: skip
    forbid("tscompress.workflows.export.onnx_graph")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "http://127.0.0.1:9/")
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "site"
    outcome = command("export", checkpoints["chronos-bolt"], "--output", out, "--page")
    assert_refused(outcome, 1, "--onnxruntime-web")
    assert not out.exists()


@pytest.mark.parametrize(
    "address",
    ["file:///etc", "registry", "http://", "http://me:secret@host/", "http://[::1", "http://a b/"],
)
def test_registry_that_is_no_plain_address_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", address)
    with pytest.raises(UsageError, match="NPM_CONFIG_REGISTRY") as refusal:
        registry()
    assert "secret" not in str(refusal.value)


def test_archive_is_taken_from_a_file(archive: bytes, tmp_path: Path, forbid: Forbid) -> None:
    forbid("tscompress.exporting.page.engine.fetched")
    path = tmp_path / "engine.tgz"
    path.write_bytes(archive)
    assert find_engine(path) == ENGINE
    path.write_bytes(archive + b" ")
    with pytest.raises(UsageError, match=engines.VERSION):
        find_engine(path)
    with pytest.raises(UsageError, match=r"none\.tgz"):
        find_engine(tmp_path / "none.tgz")
    with pytest.raises(UsageError, match="~no-such-user/x"):
        find_engine("~no-such-user/x")


# --------------------------------------------------------------------------------------------------
# The folder
# --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["chronos-bolt", "chronos-2"])
def page(request: pytest.FixtureRequest, exported: dict[str, Path], tmp_path: Path) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    forecaster = load(exported[request.param])
    sizes = write_page(directory, forecaster, ENGINE, name="<b>&'mine")
    every = sum(path.stat().st_size for path in directory.iterdir())
    legal = sum(path.stat().st_size for path in directory.glob("onnxruntime-*.txt"))
    assert sizes.page + sizes.engine + legal == every
    return directory


def test_folder_has_all_that_the_page_names(page: Path) -> None:
    text = (page / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="(?!data:)([^"]+)"', text))
    record = json.loads((page / PAGE_RECORD).read_text())
    files = {path.name for path in page.iterdir()}
    assert named | {"index.html", PAGE_RECORD} == files == {*record["sha256"], PAGE_RECORD}
    assert {"onnxruntime-LICENSE.txt", "onnxruntime-ThirdPartyNotices.txt"} < files
    assert record["source"]["model"]
    assert "/" not in record["source"]["model"]  # a page may be published
    assert "Microsoft" in (page / "onnxruntime-LICENSE.txt").read_text()
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((page / name).read_bytes()).hexdigest() == digest


def test_folder_is_replaced_only_as_it_was_written(page: Path) -> None:
    check_output(page, force=True)
    (page / "page.css").write_text("body {}")
    with pytest.raises(OutputExistsError, match=r"page\.css"):
        check_output(page, force=True)


@pytest.mark.parametrize("univariate", [False, True])
def test_page_gives_the_inputs_of_its_graph(
    univariate: bool, exported: dict[str, Path], tmp_path: Path
) -> None:
    forecaster = load(exported["chronos-2"])
    forecaster.record = dataclasses.replace(forecaster.record, univariate=univariate)
    write_page(tmp_path, forecaster, ENGINE, name="mine")
    names = UnivariateForecaster.inputs if univariate else Chronos2Forecaster.inputs
    assert inputs_of_a_call(tmp_path) == set(names)


def inputs_of_a_call(page: Path) -> set[str]:
    """Names of what the page gives to its graph, in node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    script = """
      const names = new Set(), steps = MODEL.prediction_length, levels = MODEL.quantiles.length;
      const run = async (inputs) => {
        Object.keys(inputs).forEach((name) => names.add(name));
        const [rows] = inputs.context.dims;
        return {data: new Float32Array(rows * levels * steps), dims: [rows, levels, steps]};
      };
      FORECASTS[MODEL.family](MODEL, run, new Float32Array(40), 2 * steps)
        .then(() => console.log(JSON.stringify([...names])));
    """
    files = [(page / name).read_text() for name in ("model.js", "forecast.js")]
    found = subprocess.run(
        [node], input="\n".join([*files, script]), text=True, capture_output=True, check=True
    )
    return set(json.loads(found.stdout))


def test_times_across_a_change_of_clocks(page: Path) -> None:
    """In node: hours of autumn are two, and between two hours of spring there is none."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    script = """
      const table = (rows) => ({names: ["t"], rows: rows.map((row) => [row]), first: 1});
      const hours = (times) => times.map((time) => (time - times[0]) / 36e5);
      const steps = (rows) => hours(timesOf(table(rows), 0));
      const refused = [];
      for (const row of ["2024-01-01 10:75", "2024-01-01 10:15:61", "2024-01-01 24:00"]) {
        try { timesOf(table([row]), 0); } catch { refused.push(row); }
      }
      console.log(JSON.stringify([
        steps(["2024-10-27 01:00:00+02:00", "2024-10-27 02:00:00+02:00",
               "2024-10-27 02:00:00+01:00"]),
        steps(["2024-03-31 01:00+01:00", "2024-03-31 03:00+02:00"]),
        steps(["2024-01-01T00:00Z", "2024-01-01T01:00Z"]),
        refused.length,
      ]));
    """
    text = "\n".join([(page / "read.js").read_text(), script])
    found = subprocess.run([node], input=text, text=True, capture_output=True, check=True)
    assert json.loads(found.stdout) == [[0, 1, 2], [0, 1], [0, 1], 3]


@pytest.mark.parametrize(
    ("text", "values", "labels"),
    [
        # As pandas writes a series: with a missing value, and with its index.
        ('value\n1.0\n2.0\n""\n4.0\n', [1, 2, None, 4], ["1", "2", "3", "4"]),
        (",0\n0,112.0\n1,118.0\n2,132.0\n", [112, 118, 132], ["0", "1", "2"]),
        (
            ",0\n2024-01-01,5\n2024-01-02,6\n2024-01-03,7\n",
            [5, 6, 7],
            ["2024-01-01", "2024-01-02", "2024-01-03"],
        ),
        (",5\n9,6\n4,7\n8,8\n", [5, 6, 7, 8], ["1", "2", "3", "4"]),  # a first value is missing
        (
            "t,y\n2024-01-01 00:00:10,1\n2024-01-01 00:00:20,2\n2024-01-01 00:00:30,3\n",
            [1, 2, 3],
            ["2024-01-01 00:00:10", "2024-01-01 00:00:20", "2024-01-01 00:00:30"],
        ),
        (
            "t,y\n2024-03-09,3\n2024-01-31,2\n2024-01-01,1\n",
            [1, 2, 3],
            ["1", "2", "3"],
        ),  # the newest first, without an even step
    ],
)
def test_files_as_others_write_them(
    page: Path, text: str, values: list[float | None], labels: list[str]
) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH")
    script = f"""
      const table = readTable({json.dumps(text)}, "auto");
      const last = table.names.length - 1;
      const timed = last > 0 && (kindOf(table, 0) === "time" || counts(table, 0));
      const found = readSeries(table, last, timed ? 0 : -1);
      const values = Array.from(found.values, (one) => (Number.isNaN(one) ? null : one));
      console.log(JSON.stringify([values, values.map((_, at) => found.label(at))]));
    """
    source = "\n".join([(page / "read.js").read_text(), script])
    found = subprocess.run([node], input=source, text=True, capture_output=True, check=True)
    assert json.loads(found.stdout) == [values, labels]


def test_names_are_text_in_the_page(page: Path) -> None:
    text = (page / "index.html").read_text()
    assert "&lt;b&gt;&amp;&#39;mine" in text
    assert "<b>" not in text


def test_page_may_not_reach_a_network_nor_run_text(page: Path) -> None:
    text = (page / "index.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert set(rules["script-src"].split()) == {"'self'", "file:", "blob:", "'wasm-unsafe-eval'"}
    assert "connect-src" not in rules
    assert not re.search(r"<script(?! defer src=)|\son\w+=", text)
    own = "".join(
        (page / f"{name}.js").read_text() for name in ("read", "forecast", "chart", "page")
    )
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|fetch\(|XMLHttp", own
    )


def test_command_writes_a_page(
    archive: bytes, checkpoints: dict[str, Path], exported: dict[str, Path], tmp_path: Path,
    command: Command, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    graph = (exported["chronos-bolt"] / GRAPH_FILE).read_bytes()
    monkeypatch.setattr("tscompress.workflows.export.onnx_graph", lambda *_: graph)
    tarball, out = tmp_path / "engine.tgz", tmp_path / "site"
    tarball.write_bytes(archive)
    options: tuple[Any, ...] = ("--output", out, "--page", "--onnxruntime-web", tarball, "--json")
    outcome = command("export", checkpoints["chronos-bolt"], *options)
    assert outcome.code == 0, outcome.err
    assert outcome.json["page"]["page"] > len(graph) / 2
    assert (out / "index.html").is_file()
    assert "chronos-bolt" in (out / "index.html").read_text()
    assert_refused(command("export", checkpoints["chronos-bolt"], *options), 2, "--force")
    outcome = command("export", checkpoints["chronos-bolt"], *options, "--force")
    assert outcome.code == 0, outcome.err


def test_family_without_a_page_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, command: Command, forbid: Forbid
) -> None:
    forbid("tscompress.workflows.export.find_engine")
    out = tmp_path / "site"
    outcome = command("export", checkpoints["chronos-t5"], "--output", out, "--page")
    assert_refused(outcome, 1, "--page")
    assert not out.exists()


def test_engine_without_a_page_is_refused(tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    outcome = command("export", "reference/bolt", "--output", out, "--onnxruntime-web", "x.tgz")
    assert_refused(outcome, 2, "--page")
