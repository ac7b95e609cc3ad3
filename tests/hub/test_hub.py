"""Pushing to and pulling from a Hub that runs on localhost, and everything that may go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, Repository, card_problems, takes_branch
from safetensors.torch import load_file, save_file
from shared_fixtures import ROOT, tiny_recipe

from tscompress.checkpoints.load import load
from tscompress.errors import HubError
from tscompress.io.hashing import sha256_of
from tscompress.io.network import bounded_requests, is_branch_name, is_timeout
from tscompress.plan.schedules import PowerLawSchedule
from tscompress.training.pretraining import pretrain
from tscompress.workflows.export import export
from tscompress.workflows.recipe import load_pretrain_recipe

TOKEN = "hf_" + "SecretOfAlice" * 2
OTHER_TOKEN = "hf_" + "SecretOfBob" * 3
CALIBRATE = ("--calibration-series", "4")
WEIGHTS = "model.safetensors"
CLIENT = ROOT / "tests" / "support" / "hub_client.py"
FORECAST = """
import sys, torch
from chronos import BaseChronosPipeline
for name in sys.argv[1:]:
    if "svd" in name:
        import tscompress.pipelines
    torch.manual_seed(0)
    pipeline = BaseChronosPipeline.from_pretrained(name)
    found = pipeline.predict([torch.sin(torch.arange(40.0))], prediction_length=8)
    print([value.hex() for part in found for value in part.double().flatten().tolist()])
"""


BRANCHES = ("main", "small/fold", "v1.0", "größe", "a@b", "@", "a.lock.b", "x" * 250)
NO_BRANCHES = (
    " ", "..", "a b", "x\ny", "a..b", "x" * 300, ".a", "a/.b", "a.lock", "a/", "/a", "a//b", "a.",
    "a~1", "a^", "a:b", "a?", "a*", "a[b", "a\\b", "a@{b", "HEAD", "-a", "refs/pr/1",
)  # fmt: skip


def slowly(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    waits: list[float]
    seconds: float

    @property
    def line(self) -> str:
        """The one line of a failure."""
        assert self.out == ""
        (line,) = [one for one in self.err.splitlines() if not one.startswith("note: ")]
        assert line.startswith("error: ")
        assert "Traceback" not in self.err
        return line


@dataclass
class Client:
    """A running :mod:`hub_client`."""

    hub: HubServer
    home: Path
    printed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CLIENT)], env=environment(self.hub, self.home, None),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(
        self, *arguments: object, token: str | None = TOKEN, constants: dict[str, Any] | None = None
    ) -> Outcome:
        """One command; ``constants`` are those of huggingface_hub that are others for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {
            "arguments": [str(one) for one in arguments],
            "environment": {} if token is None else {"HF_TOKEN": token},
            "constants": constants or {},
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        outcome = Outcome(**json.loads(self.process.stdout.readline()))
        self.printed.append(outcome.out + outcome.err)
        return outcome

    def close(self) -> str:
        """What it printed all in all."""
        out, err = self.process.communicate()
        return "".join([*self.printed, out, err])


def patience(fault: dict[str, Any]) -> dict[str, Any]:
    """Seconds that huggingface_hub waits: few where that is what a test is about."""
    names = "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"
    return dict.fromkeys(names, 1) if fault.get("kind") == "stall" else {}


def environment(hub: HubServer, home: Path, token: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "30",
        "HF_HUB_ETAG_TIMEOUT": "30",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Without certificates, which each client of httpx reads; the Hub here speaks HTTP.
        "SSL_CERT_DIR": str(home),
    }
    return kept | settings | ({} if token is None else {"HF_TOKEN": token})


@pytest.fixture(scope="module")
def hub(checkpoints: dict[str, Path]) -> Iterator[HubServer]:
    server = HubServer()
    server.tokens = {TOKEN: ("alice", "team"), OTHER_TOKEN: ("bob",)}
    card = b"---\nlicense: apache-2.0\n---\n# an original\n"
    for family, directory in checkpoints.items():
        server.upload(f"amazon/{family}", directory).commit("main", {"README.md": card})
    with server.running():
        yield server


@pytest.fixture(scope="module")
def command(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("home")
    started = home.stat().st_ctime
    client = Client(hub, home)
    yield client
    everything = client.close()
    assert "Traceback" not in everything
    # Of all that was printed and written, nothing holds a token.
    for token in (TOKEN, OTHER_TOKEN):
        assert token not in everything
        for path in tmp_path_factory.getbasetemp().rglob("*"):
            if not path.is_file() or path.stat().st_ctime < started:
                continue  # of other tests, before
            if "secret" not in path.parent.name:
                assert token.encode() not in path.read_bytes(), path


@pytest.fixture(scope="module")
def made(command: Client, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Compressed checkpoints, of models pulled by id."""
    root = tmp_path_factory.mktemp("made")
    sizes = {
        "chronos-t5-fold": ("--rank", 4),
        "chronos-bolt-fold": ("--rank", 4),
        "chronos-2-svd": ("--method", "svd", "--rank", 3),
    }
    found = {}
    for name, options in sizes.items():
        found[name] = root / name
        calibrate = CALIBRATE if name.endswith("fold") else ()
        outcome = command("compress", f"amazon/{name.rpartition('-')[0]}", *options, *calibrate,
                          "--output", found[name])  # fmt: skip
        assert outcome.code == 0, outcome.err
    return found


@pytest.fixture
def bolt(made: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to push from or to spoil; without the card that another test's push has left."""
    copy = tmp_path / "chronos-bolt-fold"
    return Path(
        shutil.copytree(made["chronos-bolt-fold"], copy, ignore=shutil.ignore_patterns("README.md"))
    )


@pytest.fixture
def repo_id(request: pytest.FixtureRequest, hub: HubServer) -> str:
    return f"alice/repo-{len(hub.repositories)}"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes()
            for p in directory.rglob("*") if p.is_file()}  # fmt: skip


def forget(client: Client, repo_id: str) -> None:
    """Let the next load fetch it again."""
    shutil.rmtree(client.home / "hub" / f"models--{repo_id.replace('/', '--')}", ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# The circle
# --------------------------------------------------------------------------------------------------


def test_pull_compress_push_and_pull_again_gives_the_same_forecasts(
    command: Client, hub: HubServer, made: dict[str, Path], tmp_path: Path
) -> None:
    for name, directory in made.items():
        outcome = command("push", directory, f"team/{name}")
        assert outcome.code == 0, outcome.err
        assert f"pushed to team/{name}: {hub.url}/team/{name}/commit/" in outcome.out
        stored = hub.repositories[f"team/{name}"].files()
        assert {k: v for k, v in stored.items() if k != ".gitattributes"} == contents(directory)
        card = stored["README.md"].decode()
        base = f"amazon/{name.rpartition('-')[0]}"
        assert f"\nbase_model: {base}\n" in card
        assert "\nlicense: apache-2.0\n" in card
        assert f'from_pretrained("team/{name}")' in card
        revision = json.loads((directory / "provenance.json").read_text())["source"]["revision"]
        assert f"`{base}` at commit `{revision[:12]}`" in card
    # A second push finds everything there and commits nothing.
    before = len(hub.repositories["team/chronos-bolt-fold"].commits)
    assert command("push", made["chronos-bolt-fold"], "team/chronos-bolt-fold").code == 0
    assert len(hub.repositories["team/chronos-bolt-fold"].commits) == before

    fresh = subprocess.run(
        [sys.executable, "-c", FORECAST, *(f"team/{name}" for name in made)],
        env=environment(hub, tmp_path / "fresh", None), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert fresh.returncode == 0, fresh.stderr
    for line, directory in zip(fresh.stdout.splitlines(), made.values(), strict=True):
        torch.manual_seed(0)
        forecaster = load(directory).forecaster
        found = forecaster.predict([torch.sin(torch.arange(40.0))], prediction_length=8)
        values = [v.hex() for part in found for v in part.double().flatten().tolist()]
        assert line == str(values)


def test_a_private_repository_needs_the_token(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id, "--private").code == 0
    assert hub.repositories[repo_id].private
    for token, code in ((None, 1), (OTHER_TOKEN, 1), (TOKEN, 0)):
        outcome = command("profile", repo_id, "--weights-only", "--json", token=token)
        assert outcome.code == code, outcome.err
        if code:
            assert "run `hf auth login` if it is private" in outcome.line
    # One that is public is not mistaken for a private one.
    hub.repositories[repo_id].private = False
    outcome = command("push", bolt, repo_id, "--private")
    assert (outcome.code, "exists and is public" in outcome.line) == (1, True)


def test_branches_and_pull_requests_leave_main_alone(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    theirs = hub.create("bob/model")
    ours = hub.create(repo_id)
    for name, repository in ((repo_id, ours), ("bob/model", theirs)):
        before = dict(repository.branches)
        way = ("--branch", "small/fold") if name == repo_id else ("--pr",)
        outcome = command("push", bolt, name, *way, "--message", "as said", "--json")
        assert outcome.code == 0, outcome.err
        answer = json.loads(outcome.out)
        branch = "small/fold" if name == repo_id else "refs/pr/1"
        assert repository.branches == {**before, branch: answer["commit"]}
        assert WEIGHTS in repository.files(branch)
        at = ', revision="small/fold"' if name == repo_id else ""
        card = repository.files(branch)["README.md"].decode()
        assert f'from_pretrained("{name}"{at})' in card
        assert ("--revision small/fold --against" in card) == (name == repo_id)
    assert answer["pull_request"] == f"{hub.url}/bob/model/discussions/1"
    loaded = command("profile", repo_id, "--revision", "small/fold", "--weights-only", "--json")
    assert loaded.code == 0, loaded.err


def test_a_name_below_the_owner_of_the_token_is_whole_on_the_card(
    command: Client, hub: HubServer, bolt: Path
) -> None:
    dry = command("push", bolt, "just-a-name", "--dry-run")
    assert "a push adds the owner of the token" in dry.err
    outcome = command("push", bolt, "just-a-name", "--json")
    assert outcome.code == 0, outcome.err
    whole = json.loads(outcome.out)["repo_id"]
    assert whole.endswith("/just-a-name")
    card = hub.repositories[whole].files()["README.md"].decode()
    assert f'from_pretrained("{whole}")' in card
    assert '"just-a-name"' not in card


def test_large_files_are_uploaded_in_parts_on_request(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    hub.lfs.clear()
    hub.multipart_bytes = 10_000
    try:
        assert command("push", bolt, repo_id).code == 0
    finally:
        hub.multipart_bytes = None
    assert hub.requests(r"PUT /lfs/\w+/2") > 0
    assert hub.repositories[repo_id].files()[WEIGHTS] == (bolt / WEIGHTS).read_bytes()


def test_dry_run_uses_no_network_and_writes_no_file(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    (bolt / ".env").write_text("PASSWORD=1")
    before, requests = contents(bolt), len(hub.log)
    for token in (TOKEN, None):
        outcome = command("push", bolt, repo_id, "--dry-run", token=token)
        assert outcome.code == 0, outcome.err
        assert f"{(bolt / WEIGHTS).stat().st_size:,}  {WEIGHTS}" in outcome.out
        assert "pipeline_tag: time-series-forecasting" in outcome.out
        assert "stays here: .env" in outcome.err
    assert contents(bolt) == before
    assert len(hub.log) == requests
    assert repo_id not in hub.repositories


def test_pretrained_model_is_uploaded_with_its_recipe(
    command: Client, hub: HubServer, tmp_path: Path, repo_id: str
) -> None:
    recipe = tiny_recipe("chronos-bolt", schedule=PowerLawSchedule(d_0=2, alpha=0.9))
    directory = pretrain(recipe, tmp_path / "run")
    assert directory is not None
    assert load_pretrain_recipe(directory / "pretrain.yaml") == recipe
    provenance = json.loads((directory / "provenance.json").read_text())
    assert provenance["source"]["model"] is None
    assert provenance["sha256"] == {
        path.name: sha256_of(path) for path in directory.iterdir() if path.name != "provenance.json"
    }
    outcome = command("push", directory, repo_id)
    assert outcome.code == 0, outcome.err
    assert "yours to choose; add it to README.md" in outcome.err
    stored = hub.repositories[repo_id].files()
    assert {k: v for k, v in stored.items() if k != ".gitattributes"} == contents(directory)
    card = stored["README.md"].decode()
    assert card_problems(card) == ([], [])
    assert "base_model" not in card
    assert "Trained from scratch by tscompress" in card
    assert "`tscompress pretrain pretrain.yaml --output DIR`, with:" in card
    assert "import tscompress.pipelines" in card
    assert command("profile", repo_id, "--weights-only", "--json").code == 0
    # What is not the model that was trained does not go up.
    (directory / "pretrain.yaml").write_text((directory / "pretrain.yaml").read_text() + "\n")
    assert "pretrain.yaml in" in command("push", directory, repo_id).line


@pytest.fixture(scope="module")
def graphs(
    made: dict[str, Path], exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Family to what ``export`` writes of a model in ``made``, around the graphs of another model:
    making one takes long, and a push does not run it."""
    root, found = tmp_path_factory.mktemp("graphs"), {}
    for family in ("chronos-bolt", "chronos-t5"):
        files = [p.read_bytes() for p in sorted(exported[family].glob("*.onnx"))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tscompress.workflows.export.onnx_graph", lambda *_, f=files: f.pop())
            patch.setattr("tscompress.workflows.export.largest_difference", lambda *_: 1e-6)
            found[family] = export(made[f"{family}-fold"], root / family).directory
    return found


@pytest.fixture
def graph(graphs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the graph of the weights in ``bolt``."""
    return Path(shutil.copytree(graphs["chronos-bolt"], tmp_path / "onnx"))


@pytest.fixture
def other_graph(graphs: dict[str, Path]) -> Path:
    """Of another family."""
    return graphs["chronos-t5"]


def test_exported_files_go_up_beside_the_weights_they_were_made_of(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path,
    tmp_path: Path, repo_id: str,
) -> None:  # fmt: skip
    onnx = graph
    outcome = command("push", bolt, repo_id, "--onnx", onnx)
    assert outcome.code == 0, outcome.err
    source = made["chronos-bolt-fold"]
    assert f"onnx/tscompress-export.json names {source}" in outcome.err
    stored = hub.repositories[repo_id].files()
    assert {name[5:]: found for name, found in stored.items() if name[:5] == "onnx/"} == contents(
        onnx
    )
    card = stored["README.md"].decode()
    assert card_problems(card) == ([], [])
    assert f'snapshot_download("{repo_id}", allow_patterns="onnx/*")' in card
    assert command("push", bolt, repo_id).code == 0  # the card without them
    assert "allow_patterns" not in hub.repositories[repo_id].files()["README.md"].decode()

    requests = len(hub.log)
    other = command("push", made["chronos-t5-fold"], repo_id, "--onnx", onnx)
    assert "was exported of other weights than those to push" in other.line
    assert "is no exported model" in command("push", bolt, repo_id, "--onnx", tmp_path).line
    record = onnx / "tscompress-export.json"
    written = record.read_text()
    content = json.loads(written)
    content["sha256"]["../model.onnx"] = content["sha256"]["model.onnx"]
    shutil.copy(onnx / "model.onnx", tmp_path)
    record.write_text(json.dumps(content))
    assert "no file beside it" in command("push", bolt, repo_id, "--onnx", onnx).line
    record.write_text(written)
    for name in ("README.md", "model.onnx"):
        exported = (onnx / name).read_bytes()
        (onnx / name).write_bytes(exported + b"x")
        refused = command("push", bolt, repo_id, "--onnx", onnx).line
        assert "sha256" in refused
        assert name in refused
        (onnx / name).write_bytes(exported)
    assert len(hub.log) == requests


def onnx_in(repository: Repository, revision: str = "main") -> dict[str, bytes]:
    files = repository.files(revision).items()
    return {name[5:]: content for name, content in files if name.startswith("onnx/")}


def test_a_graph_of_other_weights_goes_with_the_commit(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    revision = "small/fold"
    options = "--branch", revision
    assert command("push", bolt, repo_id, "--onnx", graph, *options).code == 0
    repository = hub.repositories[repo_id]
    stored, commits = onnx_in(repository, revision), len(repository.commits)
    # Of the same weights it is not stale.
    outcome = command("push", bolt, repo_id, *options)
    assert outcome.code == 0, outcome.err
    assert "is of these weights and stays" in outcome.err
    assert onnx_in(repository, revision) == stored

    requests = len(hub.log)
    outcome = command("push", made["chronos-t5-fold"], repo_id, "--dry-run")
    assert "left files of other weights in onnx/, they would be removed" in outcome.err
    assert len(hub.log) == requests
    outcome = command("push", made["chronos-t5-fold"], repo_id, "--json", *options)
    assert outcome.code == 0, outcome.err
    assert set(json.loads(outcome.out)["removed"]) == {f"onnx/{name}" for name in stored}
    assert len(repository.commits) == commits + 2
    assert onnx_in(repository, revision) == {}
    files = repository.files(revision)
    assert files["config.json"] == (made["chronos-t5-fold"] / "config.json").read_bytes()
    # There is no graph left to remove, but a file that a Bolt has not.
    removed = json.loads(command("push", bolt, repo_id, "--json", *options).out)["removed"]
    assert removed == ["generation_config.json"]
    assert json.loads(command("push", bolt, repo_id, "--json", *options).out)["removed"] == []


@pytest.fixture(scope="module")
def in_shards(command: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folded Chronos-Bolt in several files of weights."""
    output = tmp_path_factory.mktemp("shards") / "small"
    outcome = command("compress", "amazon/chronos-bolt", "--rank", 4, *CALIBRATE,
                      "--max-shard-size", "20kB", "--output", output)  # fmt: skip
    assert outcome.code == 0, outcome.err
    return output


def test_files_of_an_earlier_checkpoint_go_with_the_commit(
    command: Client, hub: HubServer, bolt: Path, in_shards: Path, repo_id: str
) -> None:
    """Loaders read one file of weights before shards."""
    assert command("push", bolt, repo_id).code == 0
    repository = hub.repositories[repo_id]
    repository.commit("main", {"notes.txt": b"mine"})
    outcome = command("push", in_shards, repo_id, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["removed"] == [WEIGHTS]
    shards = set(contents(in_shards))
    assert len([name for name in shards if name.endswith(".safetensors")]) > 1
    stored = set(repository.files()) - {".gitattributes"}
    assert stored == shards | {"notes.txt", "README.md"}

    (bolt / "recipe.yaml").unlink()
    record = json.loads((bolt / "provenance.json").read_text())
    del record["sha256"]["recipe.yaml"]
    (bolt / "provenance.json").write_text(json.dumps(record))
    assert command("push", bolt, repo_id).code == 0
    stored = set(repository.files()) - {".gitattributes"}
    assert stored == set(contents(bolt)) | {"notes.txt", "README.md"}


def test_weights_of_others_stay_with_a_note(
    command: Client, hub: HubServer, bolt: Path, in_shards: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id).code == 0
    hub.repositories[repo_id].commit("main", {WEIGHTS: b"other weights"})
    outcome = command("push", in_shards, repo_id)
    assert outcome.code == 0, outcome.err
    assert f"{WEIGHTS} in '{repo_id}' is none that tscompress wrote and stays" in outcome.err
    assert hub.repositories[repo_id].files()[WEIGHTS] == b"other weights"


def test_a_record_in_a_repository_cannot_name_the_card(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    """A commit that removes and adds one file is refused."""
    assert command("push", bolt, repo_id).code == 0
    repository = hub.repositories[repo_id]
    files = repository.files()
    record = json.loads(files["provenance.json"])
    record["sha256"] |= {"README.md": hashlib.sha256(files["README.md"]).hexdigest(), "../x": "0"}
    repository.commit("main", {"provenance.json": json.dumps(record).encode()})
    outcome = command("push", bolt, repo_id, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["removed"] == []
    assert repository.files() == files


def test_files_of_others_in_onnx_stay(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository = hub.repositories[repo_id]
    mine = {"model.onnx": b"another graph", "notes.txt": b"mine"}
    repository.commit("main", {f"onnx/{name}": content for name, content in mine.items()})
    outcome = command("push", made["chronos-t5-fold"], repo_id)
    assert outcome.code == 0, outcome.err
    assert "onnx/model.onnx in" in outcome.err
    assert "removed  onnx/README.md" in outcome.out
    assert onnx_in(repository) == mine


def test_a_folder_whose_record_is_none_of_ours_stays(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository = hub.repositories[repo_id]
    for turn, record in enumerate((b"{", b"[]", b"{}", b'{"format": 99}', None)):
        directory = bolt if turn % 2 else made["chronos-t5-fold"]  # not the one that is there
        repository.commit("main", {"onnx/tscompress-export.json": record})
        before = onnx_in(repository)
        outcome = command("push", directory, repo_id)
        assert outcome.code == 0, outcome.err
        assert ("is none of this tscompress" in outcome.err) == (record is not None)
        assert onnx_in(repository) == before


def test_a_record_that_names_no_weights_says_nothing_of_them(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    # That of a model in memory, which someone put there by hand.
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository = hub.repositories[repo_id]
    record = json.loads(repository.files()["onnx/tscompress-export.json"])
    record["source"]["sha256"] = {}
    repository.commit("main", {"onnx/tscompress-export.json": json.dumps(record).encode()})
    before = onnx_in(repository)
    outcome = command("push", made["chronos-t5-fold"], repo_id)
    assert outcome.code == 0, outcome.err
    assert "names no weights" in outcome.err
    assert onnx_in(repository) == before


def test_a_file_that_changes_during_the_push_stays(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository, changes = hub.repositories[repo_id], [{"onnx/model.onnx": b"another graph"}]

    def meanwhile(request: str) -> None:
        if changes and request.startswith("POST") and "/commit/" in request:
            repository.commit("main", changes.pop())

    hub.on_step = meanwhile
    outcome = command("push", made["chronos-t5-fold"], repo_id, "--json")
    assert outcome.code == 0, outcome.err
    assert not changes
    assert onnx_in(repository) == {"model.onnx": b"another graph"}
    assert "onnx/model.onnx" not in json.loads(outcome.out)["removed"]


def test_files_that_go_up_again_are_not_said_to_stay(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path,
    repo_id: str, other_graph: Path,
) -> None:  # fmt: skip
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository, other = hub.repositories[repo_id], other_graph
    for changed in ({"onnx/README.md": b"mine"}, {"onnx/tscompress-export.json": b"{"}):
        repository.commit("main", changed)
        outcome = command("push", made["chronos-t5-fold"], repo_id, "--onnx", other)
        assert outcome.code == 0, outcome.err
        assert "stays" not in outcome.err
        assert contents(other).items() <= onnx_in(repository).items()


def test_a_record_reaches_only_its_own_folder(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path, repo_id: str
) -> None:
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    repository = hub.repositories[repo_id]
    record = json.loads(repository.files()["onnx/tscompress-export.json"])
    content = b"mine"
    record["sha256"] |= {"../mine.onnx": sha256(content).hexdigest(),
                         "sub/mine.onnx": sha256(content).hexdigest()}  # fmt: skip
    mine = {"mine.onnx": content, "onnx/sub/mine.onnx": content}
    text = json.dumps(record).encode()
    repository.commit("main", {**mine, "onnx/tscompress-export.json": text})
    assert command("push", made["chronos-t5-fold"], repo_id).code == 0
    assert {name: repository.files().get(name) for name in mine} == mine
    assert onnx_in(repository).keys() == {"sub/mine.onnx"}


def test_graphs_of_another_family_go_where_new_ones_come(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path,
    repo_id: str, other_graph: Path,
) -> None:  # fmt: skip
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    other = other_graph
    outcome = command("push", made["chronos-t5-fold"], repo_id, "--onnx", other, "--json")
    assert json.loads(outcome.out)["removed"] == ["onnx/model.onnx"]
    assert onnx_in(hub.repositories[repo_id]) == contents(other)


@pytest.mark.parametrize("kind", ["lose", *slowly(("cut",), ("status",))])
def test_a_removal_whose_answer_was_lost_is_found(
    command: Client, hub: HubServer, bolt: Path, made: dict[str, Path], graph: Path,
    repo_id: str, kind: str,
) -> None:  # fmt: skip
    assert command("push", bolt, repo_id, "--onnx", graph).code == 0
    status = {"status": 503} if kind == "status" else {}
    with hub.failing("POST /api/models/.*/commit/", kind, times=1, **status):
        outcome = command("push", made["chronos-t5-fold"], repo_id, "--json")
    assert outcome.code == 0, outcome.err
    assert "onnx/model.onnx" in json.loads(outcome.out)["removed"]
    assert onnx_in(hub.repositories[repo_id]) == {}


# --------------------------------------------------------------------------------------------------
# What does not go up
# --------------------------------------------------------------------------------------------------


def test_only_known_files_go_up(command: Client, hub: HubServer, bolt: Path, repo_id: str) -> None:
    strays = {".env", "id_rsa", "notes.md", "training_args.bin", "other.safetensors"}
    for name in strays:
        (bolt / name).write_text("PASSWORD=1")
    (bolt / "checkpoints").mkdir()
    outcome = command("push", bolt, repo_id)
    assert outcome.code == 0, outcome.err
    assert not strays & hub.repositories[repo_id].files().keys()
    assert all(name in outcome.err for name in strays)


def spoil_weights(directory: Path) -> None:
    content = bytearray((directory / WEIGHTS).read_bytes())
    content[-1] ^= 0xFF
    (directory / WEIGHTS).write_bytes(content)


def edit_config(directory: Path) -> None:
    (directory / "config.json").write_text((directory / "config.json").read_text() + "\n")


def record(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "provenance.json"
    provenance = json.loads(path.read_text())
    edit(provenance)
    path.write_text(json.dumps(provenance))


def make_weights_infinite(directory: Path) -> None:
    tensors = load_file(directory / WEIGHTS)
    tensors = {name: torch.full_like(tensor, torch.inf) for name, tensor in tensors.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    record(directory, lambda p: p["sha256"].update({WEIGHTS: sha256_of(directory / WEIGHTS)}))


def paste_token(directory: Path) -> None:
    secret = directory.rename(directory.with_name("secret"))
    with (secret / "recipe.yaml").open("a") as stream:
        stream.write(f"# {TOKEN}\n")


def edit_recipe(directory: Path) -> None:
    (directory / "recipe.yaml").write_text((directory / "recipe.yaml").read_text() + "\n")


def name_another_original(directory: Path) -> None:
    path = directory / "recipe.yaml"
    path.write_text(path.read_text().replace("amazon/chronos-bolt", "amazon/chronos-t5"))
    record(directory, lambda p: p["sha256"].update({path.name: sha256_of(path)}))


def replace_by_run(directory: Path) -> None:
    shutil.move(directory, directory.with_name("inner"))
    directory.mkdir()
    shutil.move(directory.with_name("inner"), directory / "inner")


def hold_another(directory: Path) -> None:
    """A checkpoint of others, with one of ours below it."""
    shutil.copytree(directory, directory.with_name("inner"))
    shutil.move(directory.with_name("inner"), directory / "inner")
    (directory / "provenance.json").unlink()


def link_recovery_log(directory: Path) -> None:
    (directory / "recovery.jsonl").symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [
        (spoil_weights, 1, "model.safetensors in"),
        (edit_config, 1, "config.json in"),
        (lambda d: (d / "config.json").unlink(), 1, "config.json"),
        (lambda d: (d / "provenance.json").unlink(), 2, "was not written by tscompress"),
        (lambda d: (d / "plan.json").unlink(), 2, "was not written by tscompress"),
        (lambda d: (d / "provenance.json").write_text("{}"), 1, "has no source"),
        (lambda d: record(d, lambda p: p.pop("sha256")), 1, "has no sha256 of"),
        (make_weights_infinite, 1, "not finite"),
        (paste_token, 2, "looks like a Hub token"),
        (link_recovery_log, 2, "is a link"),
        (lambda d: (d / "README.md").write_text("---\n- [\n---\n"), 2, "is no model card"),
        (lambda d: (d / "README.md").mkdir(), 2, "is a directory, where the card belongs"),
        (lambda d: os.mkfifo(d / "README.md"), 2, "it is not a regular file"),
        (lambda d: (d / "README.md").symlink_to("/dev/zero"), 2, "README.md' is a link"),
        (lambda d: shutil.rmtree(d), 2, "there is no directory"),
        (replace_by_run, 2, "chronos-bolt-fold' is no checkpoint; give "),
        (hold_another, 2, "chronos-bolt-fold' was not written by tscompress"),
        (edit_recipe, 1, "differs from what tscompress wrote"),
        (name_another_original, 1, "names 'amazon/chronos-t5' as the original, provenance.json"),
    ],
)
def test_foreign_directories_are_refused_before_any_request(
    command: Client, hub: HubServer, bolt: Path, spoil: Callable[[Path], object], code: int,
    text: str,
) -> None:  # fmt: skip
    spoil(bolt)
    requests = hub.requests("POST|PUT")
    secret = bolt.with_name("secret")
    outcome = command("push", secret if secret.exists() else bolt, "alice/spoilt")
    assert outcome.code == code, outcome.err
    assert text in outcome.line
    assert hub.requests("POST|PUT") == requests
    assert "alice/spoilt" not in hub.repositories


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a/b/c"], "is not the id of a repository"),
        (["alice/with space"], "is not the id of a repository"),
        (["../up"], "is not the id of a repository"),
        (["alice/x", "--branch", "b", "--pr"], "give --branch or --pr"),
        (["alice/x", "--branch", "a..b"], "is not the name of a branch"),
        (["alice/x", "--branch", "refs/pr/1"], "is not the name of a branch"),
        *(
            (["alice/x", "--timeout", seconds], "must be above 0 and at most 86400")
            for seconds in ("0", "inf", "1e10", "nan")
        ),
        *(
            (["alice/x", option, f"pw {TOKEN}"], "holds what looks like a Hub token")
            for option in ("--message", "--branch")
        ),
        (["alice/x", "--scores", "nowhere.json"], "nowhere.json"),
    ],
)
def test_wrong_options(
    command: Client, hub: HubServer, bolt: Path, arguments: list[str], text: str
) -> None:
    requests = len(hub.log)
    outcome = command("push", bolt, *arguments)
    assert outcome.code == (1 if "--scores" in arguments else 2)
    assert text in outcome.line
    assert TOKEN not in outcome.err
    assert len(hub.log) == requests


@pytest.mark.parametrize("name", [*BRANCHES, *NO_BRANCHES])
def test_names_of_branches_are_those_that_git_and_the_hub_take(name: str) -> None:
    expected = name in BRANCHES
    assert is_branch_name(name) == takes_branch(name) == expected
    if shutil.which("git") and not name.startswith("refs/") and len(name) < 250:
        git = ["git", "check-ref-format", "--branch", name]
        done = subprocess.run(git, capture_output=True, check=False, cwd="/")
        assert (done.returncode == 0) == expected


def test_directories_without_checkpoint_are_refused(command: Client, bolt: Path) -> None:
    outcome = command("push", bolt / WEIGHTS, "alice/x")
    assert outcome.code == 2
    assert outcome.line.endswith("is a file; give the directory that it is in.")
    outcome = command("push", "reference/bolt", "alice/x")
    assert (outcome.code, "'reference/bolt' comes with tscompress" in outcome.line) == (2, True)
    shutil.copytree(bolt, bolt.parent / "second")
    outcome = command("push", bolt.parent, "alice/x")
    assert f"give {str(bolt)!r} (or another of 2 in it)." in outcome.line


def test_a_token_in_the_name_of_the_directory_is_not_published(command: Client, bolt: Path) -> None:
    outcome = command("push", bolt.rename(bolt.with_name(TOKEN)), "alice/x", "--dry-run")
    assert (outcome.code, "the commit message holds what looks" in outcome.line) == (2, True)
    bolt.with_name(TOKEN).rename(bolt)


def test_advice_for_programmers_is_not_passed_on(command: Client, bolt: Path) -> None:
    (bolt / "README.md").write_text("---\nmodel-index:\n- name: a\n---\n# mine\n")
    outcome = command("push", bolt, "alice/x", "--dry-run")
    assert (outcome.code, "`model_index` in metadata cannot be parsed" in outcome.line) == (2, True)
    assert outcome.line.endswith("; fix it, or pass --force.")
    assert "ignore_metadata_errors" not in outcome.err


def test_paths_of_the_users_data_are_told(command: Client, bolt: Path) -> None:
    record(bolt, lambda p: p["calibration"].update(source="clients/acme.csv"))
    recovery = {"teacher": "/models/theirs", "config": {"series": ["/data/beta.parquet"]}}
    record(bolt, lambda p: p.update(recovery=recovery))
    outcome = command("push", bolt, "alice/x", "--dry-run")
    assert outcome.code == 0, outcome.err
    (told,) = [line for line in outcome.err.splitlines() if "provenance.json names" in line]
    for path in ("clients/acme.csv", "/models/theirs", "/data/beta.parquet"):
        assert path in told


def test_measurements_of_another_model_do_not_go_up(
    command: Client, bolt: Path, made: dict[str, Path]
) -> None:
    bench = json.loads(command("bench", made["chronos-2-svd"], "--context-length", 64,
                               "--repeats", 1, "--no-memory", "--json").out)  # fmt: skip
    path = bolt.parent / "bench.json"
    path.write_text(json.dumps(bench))
    outcome = command("push", bolt, "alice/x", "--bench", path, "--dry-run")
    assert (outcome.code, "the latencies are of 'chronos-2-svd', which" in outcome.line) == (
        2,
        True,
    )
    outcome = command("push", made["chronos-2-svd"], "alice/x", "--bench", path, "--dry-run")
    assert outcome.code == 0
    assert "of a model called" not in outcome.err
    path.write_text(json.dumps(bench | {"workload": "x"}))
    outcome = command("push", bolt, "alice/x", "--bench", path, "--dry-run")
    assert outcome.code == 1
    assert outcome.line.startswith(f"error: {str(path)!r} is not what `tscompress bench --json`")


def test_directories_of_older_versions_go_up_with_a_note(command: Client, bolt: Path) -> None:
    record(bolt, lambda p: [p["sha256"].pop(name) for name in ("config.json", "recipe.yaml")])
    outcome = command("push", bolt, "alice/older", "--dry-run")
    assert outcome.code == 0
    assert "an older tscompress recorded no sha256 of config.json, recipe.yaml:" in outcome.err


def test_card_by_hand_is_uploaded_unchanged(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    by_hand = "---\nlicense: mit\n---\n# mine\n"
    (bolt / "README.md").write_text(by_hand)
    outcome = command("push", bolt, repo_id)
    assert outcome.code == 0
    assert "was written by hand and is uploaded unchanged" in outcome.err
    assert hub.repositories[repo_id].files()["README.md"].decode() == by_hand
    assert command("push", bolt, repo_id, "--force").code == 0
    assert "written by tscompress" in hub.repositories[repo_id].files()["README.md"].decode()
    # What the Hub says against a card is passed on.
    (bolt / "README.md").write_text(by_hand.replace("mit", "mine"))
    outcome = command("push", bolt, repo_id)
    assert (outcome.code, '"license" must be one of' in outcome.line) == (1, True)


# --------------------------------------------------------------------------------------------------
# Failures on the way up
# --------------------------------------------------------------------------------------------------

CREATE, BRANCH, PREUPLOAD, BATCH, PUT, COMMIT = (
    "POST /api/repos/create", "POST .*/branch/", "POST .*/preupload/", "POST .*/objects/batch",
    "PUT /lfs/", "POST .*/commit/",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "fault", "text"),
    [
        (CREATE, {"status": 403}, "the token may not write there"),
        (CREATE, {"kind": "stall"}, "said nothing for 0.5 seconds"),
        (PREUPLOAD, {"status": 403, "headers": {"X-Error-Code": "GatedRepo"}}, "it is gated"),
        (BATCH, {"status": 401}, "does not accept the token"),
        (PUT, {"kind": "cut"}, "the connection was cut"),
        (PUT, {"status": 429, "headers": {"Retry-After": "7200"}}, "asks to wait 7200"),
        (COMMIT, {"status": 409}, "something else changed it at the same time"),
        (COMMIT, {"status": 502}, "HTTP status 502 each time"),
        *slowly(
            (CREATE, {"status": 401}, "does not accept the token"),
            (CREATE, {"status": 500}, "HTTP status 500 each time"),
            (CREATE, {"kind": "cut"}, "the connection was cut"),
            (CREATE, {"status": 429, "headers": {"Retry-After": "86400"}}, "asks to wait 86400"),
            (BRANCH, {"status": 404}, "creating the branch 'b'"),
            (PREUPLOAD, {"status": 503}, "HTTP status 503 each time"),
            (PREUPLOAD, {"status": 429, "headers": {"Retry-After": "7200"}}, "asks to wait 7200"),
            (PUT, {"kind": "stall"}, "said nothing for 0.5 seconds"),
            (PUT, {"status": 500}, "HTTP status 500 each time"),
            (COMMIT, {"status": 412}, "something else changed it at the same time"),
            (COMMIT, {"status": 404}, "no such repository or branch"),
            (COMMIT, {"status": 413}, "HTTP status 413"),
            (COMMIT, {"status": 429}, "too many requests"),
            (COMMIT, {"kind": "cut"}, "the connection was cut"),
            (COMMIT, {"kind": "stall"}, "said nothing for 0.5 seconds"),
            ("POST .*/validate-yaml", {"status": 500}, "HTTP status 500 each time"),
        ),
    ],
)
def test_lasting_failures_are_one_line_and_commit_nothing(
    command: Client, hub: HubServer, bolt: Path, repo_id: str, pattern: str,
    fault: dict[str, Any], text: str,
) -> None:  # fmt: skip
    hub.lfs.clear()
    seconds = 0.5 if fault.get("kind") == "stall" else 30
    options = ("--timeout", seconds, *(("--branch", "b") if pattern == BRANCH else ()))
    with hub.failing(pattern, **fault) as seen:
        outcome = command("push", bolt, repo_id, *options)
    assert outcome.code == 1, outcome.err
    assert text in outcome.line
    assert repo_id in outcome.line or "asks to wait" in outcome.line
    assert 1 <= seen.seen <= 18  # three of ours, six of huggingface_hub's
    assert all(wait <= 60 for wait in outcome.waits)
    repository = hub.repositories.get(repo_id, Repository())
    assert len(repository.commits) <= 1  # the one that creation makes
    after = contents(bolt)
    assert json.loads(after["provenance.json"])["sha256"][WEIGHTS] == sha256_of(bolt / WEIGHTS)
    # Once the trouble is over, the same command works.
    if pattern == COMMIT:
        assert command("push", bolt, repo_id).code == 0


PASSING: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "503": {"status": 503},
    "429": {"status": 429, "headers": {"Retry-After": "17"}},
    "cut": {"kind": "cut"},
    "lose": {"kind": "lose"},
}
FAST = {(CREATE, "500"), (PREUPLOAD, "503"), (PUT, "cut"), (COMMIT, "429"), (COMMIT, "lose")}


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        pytest.param(
            pattern,
            fault,
            id=f"{pattern}-{name}",
            marks=() if (pattern, name) in FAST else pytest.mark.slow,
        )
        for pattern in (CREATE, PREUPLOAD, BATCH, PUT, "POST .*/verify", COMMIT)
        for name, fault in PASSING.items()
    ],
)
def test_passing_failures_pass(
    command: Client, hub: HubServer, bolt: Path, repo_id: str, pattern: str,
    fault: dict[str, Any],
) -> None:  # fmt: skip
    hub.lfs.clear()
    with hub.failing(pattern, times=1, **fault) as seen:
        outcome = command("push", bolt, repo_id)
    assert outcome.code == 0, outcome.err
    assert seen.seen == 1
    assert all(line.startswith("note: ") for line in outcome.err.splitlines())
    # One commit besides the first, even where the answer to it was lost.
    assert len(hub.repositories[repo_id].commits) == 2
    assert hub.repositories[repo_id].files()[WEIGHTS] == (bolt / WEIGHTS).read_bytes()
    if fault.get("headers"):
        assert 17 <= max(outcome.waits) <= 18


@pytest.mark.parametrize(
    ("fault", "code", "opened"),
    [
        ({"kind": "lose"}, 1, 1),
        ({"status": 500}, 1, 0),
        ({"status": 503}, 0, 1),
        *slowly(({"kind": "cut"}, 1, 0)),
    ],
)
def test_a_pull_request_is_not_opened_twice(
    command: Client, hub: HubServer, bolt: Path, repo_id: str, fault: dict[str, Any], code: int,
    opened: int,
) -> None:  # fmt: skip
    theirs = hub.create(f"bob/{repo_id.rpartition('/')[2]}")
    name = f"bob/{repo_id.rpartition('/')[2]}"
    with hub.failing(COMMIT, times=1, **fault):
        outcome = command("push", bolt, name, "--pr")
    assert outcome.code == code, outcome.err
    assert theirs.pull_requests == opened
    if "kind" in fault:
        assert f"{name}/discussions whether the pull request is there" in outcome.line


@pytest.mark.parametrize("moment", [CREATE, *slowly((PUT,)), COMMIT])
def test_unverified_files_are_not_committed(
    command: Client, hub: HubServer, made: dict[str, Path], bolt: Path, repo_id: str, moment: str
) -> None:
    """Another checkpoint takes the directory's place, as ``compress --force`` puts one there."""
    other = bolt.with_name("other")
    shutil.copytree(bolt, other)
    tensors = {name: 2 * tensor for name, tensor in load_file(other / WEIGHTS).items()}
    save_file(tensors, other / WEIGHTS, metadata={"format": "pt"})
    record(other, lambda p: p["sha256"].update({WEIGHTS: sha256_of(other / WEIGHTS)}))
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    was = contents(bolt)
    hub.lfs.clear()

    def replace(request: str) -> None:
        if re.match(moment, request) and other.exists():
            bolt.rename(bolt.with_name("before"))
            other.rename(bolt)

    hub.on_step = replace
    try:
        outcome = command("push", bolt, repo_id)
    finally:
        hub.on_step = lambda request: None
    assert not other.exists()
    stored = hub.repositories[repo_id].files()
    if moment == CREATE:
        assert outcome.code == 1, outcome.err
        assert "model.safetensors in" in outcome.line
        assert "changed while it was being pushed; nothing was committed" in outcome.line
        assert stored.keys() == {".gitattributes"}
        assert hub.lfs == {}
    else:  # what was verified is on its way already
        assert outcome.code == 0, outcome.err
        assert {name: stored[name] for name in was} == was


def test_weights_changed_during_a_push_are_not_committed(
    command: Client, hub: HubServer, bolt: Path, repo_id: str
) -> None:
    def overwrite(request: str) -> None:
        if re.match(CREATE, request):
            state = (bolt / WEIGHTS).stat()
            spoil_weights(bolt)
            os.utime(bolt / WEIGHTS, ns=(state.st_atime_ns, state.st_mtime_ns))

    hub.on_step = lambda request: None if repo_id in hub.repositories else overwrite(request)
    try:
        outcome = command("push", bolt, repo_id)
    finally:
        hub.on_step = lambda request: None
    assert (outcome.code, "changed while it was being pushed" in outcome.line) == (1, True)
    assert hub.repositories[repo_id].files().keys() == {".gitattributes"}


def test_settings_that_cannot_be_used_are_named(
    command: Client, hub: HubServer, bolt: Path, tmp_path: Path, repo_id: str
) -> None:
    outcome = command("push", bolt, repo_id, token="hf_Schlüssel")
    assert (outcome.code, "the token of HF_TOKEN" in outcome.line) == (2, True)
    assert "Schl" not in outcome.err
    assert repo_id not in hub.repositories
    found = subprocess.run(
        [sys.executable, "-m", "tscompress", "push", str(bolt), repo_id],
        env=environment(hub, tmp_path, TOKEN) | {"HF_ENDPOINT": "http://[bad"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    expected = "error: HF_ENDPOINT is 'http://[bad', which is no address; set it to one such as"
    assert found.stderr.startswith(expected)
    assert found.stderr.count("\n") == 1


def test_versions_of_huggingface_hub_before_1_have_the_same_bounds(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = pytest.importorskip("requests")
    from huggingface_hub.utils import _http

    def configure(factory: Callable[[], Any]) -> None:
        monkeypatch.setattr(_http, "_GLOBAL_BACKEND_FACTORY", factory)

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delattr(_http, "set_client_factory")
    monkeypatch.setattr(_http, "_GLOBAL_BACKEND_FACTORY", requests.Session, raising=False)
    monkeypatch.setattr(_http, "configure_http_backend", configure, raising=False)
    with bounded_requests(0.2), hub.failing("GET .*/bolt", "stall"):
        with pytest.raises(requests.Timeout) as caught:
            _http._GLOBAL_BACKEND_FACTORY().get(hub.url + "/bolt")
        assert is_timeout(caught.value)
    with bounded_requests(30):
        session = _http._GLOBAL_BACKEND_FACTORY()
        assert session.get(hub.url + "/api/models/amazon/chronos-bolt").status_code == 200
        with hub.failing("GET .*/bolt", "stall"), pytest.raises(requests.Timeout, match=r"=0\.1"):
            session.get(hub.url + "/bolt", timeout=0.1)
        pause = {"Retry-After": "7200"}
        with (
            hub.failing("GET .*/bolt", status=429, headers=pause),
            pytest.raises(HubError, match="asks to wait 7200 seconds"),
        ):
            session.get(hub.url + "/bolt")
        with hub.failing(CREATE, status=409):
            for _ in range(10):
                session.post(hub.url + "/api/repos/create", json={})
            with pytest.raises(HubError, match="is busy"):
                session.post(hub.url + "/api/repos/create", json={})
    assert _http._GLOBAL_BACKEND_FACTORY is requests.Session


def test_without_a_valid_token(command: Client, hub: HubServer, bolt: Path, repo_id: str) -> None:
    requests = hub.requests("POST")
    assert "there is no token to push with" in command("push", bolt, repo_id, token=None).line
    assert hub.requests("POST") == requests
    assert not (bolt / "README.md").exists()
    # An invalid one is not repeated to the user.
    stale = TOKEN.replace("Alice", "Carol")
    outcome = command("push", bolt, repo_id, token=stale)
    assert "does not accept the token" in outcome.line
    assert stale not in outcome.err
    outcome = command("push", bolt, "bob/no-such-repository")
    assert "use one with write access to 'bob', or push with --pr" in outcome.line


def test_a_busy_hub_is_not_asked_for_ever(command: Client, hub: HubServer, bolt: Path) -> None:
    message = "Cannot create repo: another conflicting operation is in progress"
    with hub.failing(CREATE, status=409, message=message) as seen:
        outcome = command("push", bolt, "alice/busy")
    assert "the Hub is busy with other requests of the same owner" in outcome.line
    assert seen.seen == 11


# --------------------------------------------------------------------------------------------------
# Failures on the way down
# --------------------------------------------------------------------------------------------------

INFO, TREE, FILE, CONFIG = (
    "GET /api/models/[^/]+/[^/]+/revision", "GET .*/tree/", f"GET .*/{WEIGHTS}",
    "GET .*/config.json",
)  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "fault", "text"),
    [
        (INFO, {"status": 401}, "does not accept your token"),
        (INFO, {"status": 403, "headers": {"X-Error-Code": "GatedRepo"}}, "is gated"),
        *slowly(
            (
                INFO,
                {"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}},
                "neither a directory",
            )
        ),
        *slowly(
            (INFO, {"status": 404, "headers": {"X-Error-Code": "RevisionNotFound"}}, "no revision")
        ),
        (INFO, {"status": 500}, "HTTP status 500"),
        *slowly((INFO, {"status": 429}, "HTTP status 429")),
        (INFO, {"status": 429, "headers": {"Retry-After": "3600"}}, "asks to wait 3600"),
        *slowly((INFO, {"kind": "cut"}, "the Hub cannot be reached")),
        (INFO, {"kind": "stall"}, "the Hub cannot be reached"),
        *slowly((TREE, {"status": 500}, "HTTP status 500")),
        *slowly((FILE, {"status": 500}, "HTTP status 500")),
        *slowly((FILE, {"status": 429, "headers": {"Retry-After": "3600"}}, "asks to wait 3600")),
        (FILE, {"kind": "corrupt"}, "arrived twice with another hash"),
        (CONFIG, {"kind": "corrupt"}, "config.json arrived twice with another hash"),
        (f"HEAD .*/{WEIGHTS}", {"kind": "etag"}, "arrived twice with another hash"),
    ],
)
def test_lasting_failures_of_a_download_are_one_line(
    command: Client, hub: HubServer, made: dict[str, Path], pattern: str, fault: dict[str, Any],
    text: str,
) -> None:  # fmt: skip
    hub.repositories.pop("alice/down", None)
    hub.upload("alice/down", made["chronos-bolt-fold"])
    forget(command, "alice/down")
    asked = ("profile", "alice/down", "--weights-only", "--json", "--revision", "main")
    with hub.failing(pattern, **fault):
        outcome = command(*asked, constants=patience(fault))
    assert outcome.code == 1, outcome.err
    assert text in outcome.line
    if pattern != INFO:  # something was downloaded
        again = command("profile", "alice/down", "--weights-only", "--json")
        assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        (INFO, {"status": 500}),
        (INFO, {"status": 429, "headers": {"Retry-After": "17"}}),
        (INFO, {"kind": "cut"}),
        (FILE, {"status": 500}),
        *slowly((TREE, {"status": 503}), ("HEAD ", {"status": 500}), (FILE, {"status": 429})),
        (FILE, {"kind": "cut"}),
        (FILE, {"kind": "stall"}),
        (FILE, {"kind": "corrupt"}),
        (CONFIG, {"kind": "corrupt"}),
        (f"HEAD .*/{WEIGHTS}", {"kind": "etag"}),
    ],
)
def test_passing_failures_of_a_download_pass(
    command: Client, hub: HubServer, made: dict[str, Path], pattern: str, fault: dict[str, Any]
) -> None:
    hub.repositories.pop("alice/down", None)
    hub.upload("alice/down", made["chronos-bolt-fold"])
    forget(command, "alice/down")
    asked = ("profile", "alice/down", "--weights-only", "--json", "--revision", "main")
    with hub.failing(pattern, times=1, **fault) as seen:
        outcome = command(*asked, constants=patience(fault))
    assert outcome.code == 0, outcome.err
    assert seen.seen == 1
    (snapshot,) = (command.home / "hub" / "models--alice--down" / "snapshots").iterdir()
    assert (snapshot / WEIGHTS).read_bytes() == (made["chronos-bolt-fold"] / WEIGHTS).read_bytes()


def test_a_cache_without_links_is_checked_too(
    command: Client, hub: HubServer, made: dict[str, Path]
) -> None:
    hub.upload("alice/copies", made["chronos-bolt-fold"])

    def profile() -> Outcome:
        disabled = {"HF_HUB_DISABLE_SYMLINKS": True}
        return command("profile", "alice/copies", "--weights-only", constants=disabled)

    with hub.failing(FILE, kind="corrupt"):
        done = profile()
    assert done.code == 1
    assert f"{WEIGHTS} arrived twice with another hash" in done.err
    with hub.failing(FILE, times=1, kind="corrupt") as seen:
        done = profile()
    assert (done.code, seen.seen) == (0, 1), done.err
    (stored,) = command.home.glob(f"hub/models--alice--copies/snapshots/*/{WEIGHTS}")
    assert not stored.is_symlink()
    assert stored.read_bytes() == (made["chronos-bolt-fold"] / WEIGHTS).read_bytes()


def test_weights_that_were_changed_on_the_hub_are_found_out(
    command: Client, hub: HubServer, bolt: Path
) -> None:
    spoil_weights(bolt)
    hub.upload("alice/changed", bolt)
    outcome = command("profile", "alice/changed", "--weights-only", "--json")
    assert "sha256" in outcome.line


def test_gated_models(command: Client, hub: HubServer, made: dict[str, Path]) -> None:
    hub.upload("bob/gated", made["chronos-bolt-fold"], gated=True)
    for token in (TOKEN, None):
        outcome = command("profile", "bob/gated", "--weights-only", "--json", token=token)
        assert "is gated; ask for access" in outcome.line
    assert command("profile", "bob/gated", "--weights-only", "--json", token=OTHER_TOKEN).code == 0
