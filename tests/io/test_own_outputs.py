"""``--force`` replaces what tscompress wrote, and nothing else, whoever runs it."""

from __future__ import annotations

import csv
import io
import json
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from own_checkpoint import RECORD, record
from replaced import making_way
from safetensors.numpy import save_file
from shared_fixtures import Command, assert_refused

from tscompress.errors import OutputError, OutputExistsError
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    write_output,
    write_text_atomically,
)
from tscompress.io.making_way import journal_of
from tscompress.io.own_outputs import foreign_part, is_marked, is_own_file, mark_of, table_csv
from tscompress.plotting import new_figure, save_figure

ROW = {"dataset": "a", "model": "a", "MASE": 1, "WQL": 1, "series_count": 1, "seconds": 1}
SCORES = json.dumps({"result": {"suite": "offline", "model": "a", "rows": [ROW]}})
MARKDOWN = "# a, compressed\n"
LINE = (
    '{"step": 1, "total_steps": 9, "seconds": 1.0, "eta_seconds": 1.0, "learning_rate": 0.1, '
    '"series_per_second": 1.0}\n'
)


def checkpoint(directory: Path) -> Path:
    """As tscompress writes one, in small."""
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_text("{}")
    record(directory)
    return directory


def everything(root: Path) -> dict[str, object]:
    """All that lies below a directory, with content, mode and device."""

    def content(path: Path) -> object:
        if path.is_symlink():
            return path.readlink()
        return path.read_bytes() if path.is_file() else None

    return {
        str(path.relative_to(root)): (path.lstat().st_mode, path.lstat().st_rdev, content(path))
        for path in sorted(root.rglob("*"))
    }


# --------------------------------------------------------------------------------------------------
# What is never replaced
# --------------------------------------------------------------------------------------------------


def make_device(path: Path) -> None:
    """A node like /dev/null, in a directory of the test."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("nodes need root")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # a long path is no address


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def make_checkpoint_of_others(path: Path) -> None:
    checkpoint(path)
    (path / RECORD).unlink()


def make_checkpoint_with_notes(path: Path) -> None:
    (checkpoint(path) / "notes.md").write_text("# mine")


def make_checkpoint_with_directory(path: Path) -> None:
    (checkpoint(path) / "mine").mkdir()


def make_checkpoint_with_link(path: Path) -> None:
    (checkpoint(path) / "README.md").symlink_to("config.json")


def make_checkpoint_trained_further(path: Path) -> None:
    (checkpoint(path) / "model.safetensors").write_bytes(b"others")


def make_models(path: Path) -> None:
    for name in ("small", "large"):
        checkpoint(path / name)


def make_scores(path: Path) -> None:
    path.mkdir()
    (path / "scores.json").write_text(SCORES)


def make_link_to_a_file(path: Path) -> None:
    path.with_name("file").write_text("mine")
    path.symlink_to("file")


def make_link_to_a_directory(path: Path) -> None:
    make_directory(path.with_name("directory"))
    path.symlink_to("directory")


SPECIAL = (make_device, os.mkfifo, make_socket)
FOREIGN = (
    *SPECIAL, make_file, make_directory, make_checkpoint_of_others, make_checkpoint_with_notes,
    make_checkpoint_with_directory, make_checkpoint_with_link, make_checkpoint_trained_further,
    make_models, make_link_to_a_file, make_link_to_a_directory,
)  # fmt: skip


def named(maker: object) -> str:
    return getattr(maker, "__name__", "")


@pytest.fixture
def target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> Iterator[Path]:
    """What a test's maker made, which with all around it must stay as it is."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "outputs" / "target"
    path.parent.mkdir()
    make(path)
    before = everything(tmp_path)
    yield path
    assert everything(tmp_path) == before


@pytest.mark.parametrize("make", [*FOREIGN, make_scores], ids=named)
def test_no_checkpoint_takes_the_place_of_anything_else(target: Path) -> None:
    with pytest.raises(OutputExistsError, match="target'"):
        check_output(target, force=True)
    with (
        pytest.raises(OutputExistsError, match="target'"),
        new_directory(target, force=True) as directory,
    ):
        (directory / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((make, "scores.csv") for make in (*SPECIAL, make_file, make_directory)),
        (make_link_to_a_directory, "scores.csv"),
        (make_directory, "mine.txt"),
        (make_checkpoint_with_notes, "notes.md"),
        (make_checkpoint_with_directory, "mine"),
        (make_checkpoint_with_link, "README.md"),
        (make_checkpoint_with_link, "model.safetensors"),
        (make_models, "small"),
    ],
)
def test_no_file_is_written_over_or_beside_what_is_not_ours(target: Path, name: str) -> None:
    with pytest.raises(OutputExistsError, match="target'"):
        check_output(target, force=True, writes=[name])


@pytest.mark.parametrize("make", FOREIGN, ids=named)
def test_no_file_takes_the_place_of_anything_else(target: Path) -> None:
    for call in (
        lambda: check_file(target, force=True),
        lambda: write_output(target, "{}", force=True),
    ):
        with pytest.raises((OutputExistsError, OutputError), match="target'"):
            call()


@pytest.mark.parametrize("make", SPECIAL, ids=named)
@pytest.mark.parametrize("linked", [False, True])
def test_library_calls_replace_no_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    linked: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "target"
    make(target)
    if linked:
        target = tmp_path / "link"
        target.symlink_to("target")
    before = everything(tmp_path)
    with pytest.raises(OutputError, match=f"{target.name}'"):
        write_text_atomically(target, "text")
    assert everything(tmp_path) == before


def test_files_that_come_meanwhile_are_not_replaced(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target")

    def slow() -> None:
        with new_directory(target, force=True) as directory:
            (directory / "config.json").write_text("{}")
            (target / "mine.txt").write_text("mine")

    with pytest.raises(OutputExistsError, match=r"mine\.txt"):
        slow()
    assert (target / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def as_nobody(root: Path, work: Callable[[], int]) -> int:
    """What a child without privileges returns, who owns all that lies below ``root``."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("needs root")
    for path in root.parents:
        if path.stat().st_uid == 0 and path != Path(path.anchor) and not path.stat().st_mode & 1:
            path.chmod(path.stat().st_mode | 0o111)
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 99
        try:
            os.setgid(65534)
            os.setuid(65534)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refusals(calls: Iterable[Callable[[], object]], code: int) -> int:
    """How many of some calls are not refused with one line and this exit code."""
    wrong = 0
    for call in calls:
        try:
            call()
        except (OutputExistsError, OutputError) as error:
            wrong += error.exit_code != code or len(str(error).splitlines()) != 1
        else:
            wrong += 1
    return wrong


def test_the_same_holds_for_others_than_root(tmp_path: Path) -> None:
    """Who owns the directory could rename over everything."""
    root = tmp_path / "theirs"
    root.mkdir()
    for make in (make_file, make_directory, make_models, make_device, os.mkfifo):
        make(root / named(make))

    def work() -> int:
        check_output(root / "new", force=True)  # there it may write
        calls = [partial(check_output, path, force=True) for path in root.iterdir()]
        return refusals(calls, 2)

    before = everything(root)
    assert as_nobody(root, work) == 0
    assert everything(root) == before


@pytest.mark.parametrize("journal", [None, '{"small": true}'])
def test_a_directory_that_nobody_may_write_to_stays_as_it_is(
    tmp_path: Path, journal: str | None
) -> None:
    root = tmp_path / "theirs"
    small, page, aside = root / "small", root / "scores.json", root / ".small.tscompress-before"
    checkpoint(small)
    page.write_text(SCORES)
    if journal is not None:
        journal_of(small).write_text(journal)
        checkpoint(aside)
    root.chmod(0o555)

    def work() -> int:
        return refusals(
            [
                lambda: new_directory(small, force=True).__enter__(),
                lambda: new_directory(root / "new").__enter__(),
                lambda: check_output(small, force=True),
                lambda: check_file(page, force=True),
                lambda: write_output(page, "{}", force=True),
                lambda: write_text_atomically(page, "{}"),
                lambda: making_way([small, page]).__enter__(),
            ],
            1,
        )

    before = everything(root)
    assert as_nobody(root, work) == 0
    assert everything(root) == before


# --------------------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------------------


def make_link_below_a_file(path: Path) -> None:
    path.with_name("file").write_text("mine")
    path.symlink_to("file/nothing")


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


PRETRAIN = """
family: chronos-bolt
name: a
architecture: {d_model: 24, d_kv: 8, d_ff: 40, num_layers: 2, num_decoder_layers: 2, num_heads: 4,
  context_length: 64, prediction_length: 16, vocab_size: 64}
stages: [{steps: 4, buckets: [{context_length: 32, horizon: 8, batch_size: 4}]}]
"""
RUN = "model: MODEL\nmethod: svd\nschedule: {kind: rank, rank: 2}\nevaluation: null\n"
VERBS: dict[str, tuple[object, ...]] = {
    "compress": ("MODEL", "--rank", 2, "--method", "svd"),
    "recover": ("MODEL", "--teacher", "MODEL"),
    "evaluate": ("MODEL",),
    "profile": ("MODEL",),
    "sensitivity": ("MODEL",),
    "probe": ("MODEL",),
    "pretrain": ("pretrain.yaml",),
    "run": ("run.yaml",),
}


@pytest.mark.parametrize(
    ("verb", "make"),
    [
        (verb, make)
        for verb in VERBS
        for make in (
            *SPECIAL,
            make_file,
            make_directory,
            make_link_below_a_file,
            make_link_to_itself,
        )
        if (verb, make) != ("run", make_directory)  # in which it makes one of its own
    ],
    ids=lambda one: one if isinstance(one, str) else named(one),
)
def test_a_command_refuses_in_one_line_before_any_work(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    verb: str,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    bolt = checkpoints["chronos-bolt"]
    Path("pretrain.yaml").write_text(PRETRAIN)
    Path("run.yaml").write_text(RUN.replace("MODEL", str(bolt)))
    Path("outputs").mkdir()
    make(tmp_path / "outputs" / "target")
    before = everything(tmp_path)
    monkeypatch.setattr("tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("loaded"))
    arguments = [bolt if word == "MODEL" else word for word in VERBS[verb]]
    outcome = command(verb, *arguments, "--output", "outputs/target", "--force")
    # A directory in the place of a file, and a link that leads nowhere: it cannot be written.
    assert outcome.code in (1, 2)
    assert_refused(outcome, outcome.code, "outputs/target")
    lines = outcome.err.splitlines()
    assert ("cannot be written" in lines[-1]) == (outcome.code == 1)
    assert everything(tmp_path) == before


# --------------------------------------------------------------------------------------------------
# What is ours
# --------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_known_by_the_hashes_in_its_record(tmp_path: Path) -> None:
    ours = checkpoint(tmp_path / "ours")
    assert foreign_part(ours) is None
    (ours / RECORD).rename(ours / "renamed.json")  # its content counts
    assert foreign_part(ours) is None
    (ours / "config.json").write_text('{"edited": 1}')
    assert foreign_part(ours) == "config.json"


def test_other_files_in_a_checkpoint_are_known_by_content(tmp_path: Path) -> None:
    ours = checkpoint(tmp_path / "ours")
    text = "---\nlicense: mit\n---\n"
    card = f"---\n{mark_of(text)}\n".join(["", text.removeprefix("---\n")])
    assert is_marked(card)
    (ours / "README.md").write_text(card)
    (ours / "recovery.jsonl").write_text(LINE)
    save_figure(new_figure(1, 1), ours / "recovery.png")
    assert foreign_part(ours) is None
    (ours / "README.md").write_text(card + "mine")
    assert foreign_part(ours) == "README.md"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scores.json", SCORES),
        (
            "profile.json",
            '{"model": "a", "family": "b", "epsilons": [0.1], "weight_floor": 0, "input_floor": 0, '
            '"weights": []}',
        ),
        (
            "probe.json",
            '{"result": {"model": "a", "seed": 0, "tasks": [{"task": {}, "skill": {}, '
            '"seasonal_naive": 0, "coverage": 0, "crossing_rate": 0}]}, "summary": {}}',
        ),
        (
            "report.json",
            '{"recipe": {}, "checkpoint": "a", "plan": {}, "attention_parameter_ratio": 1, '
            '"relative": null}',
        ),
        ("report.html", '<!doctype html>\n<meta name="generator" content="tscompress 0.0.1">'),
        ("report.md", f"{mark_of(MARKDOWN)}\n{MARKDOWN}"),
        ("scores.csv", '"dataset",model,MASE,WQL\na,b,1,1\n'),
        ("ranks.csv", "matrix,part,kind,depth,role,head,full_rank,epsilon,rank\n"),
        (
            "compared.csv",
            "profile,family,matrix,kind,d_model,matrices,epsilon,mean_rank,mean_share\n",
        ),
        ("log.jsonl", LINE),
        ("log.jsonl", LINE[:60]),  # cut off as it was written
        ("empty", ""),
    ],
)
def test_files_of_any_version_are_known_under_any_name(
    tmp_path: Path, name: str, text: str
) -> None:
    for path in (tmp_path / name, tmp_path / "other"):
        path.write_text(text)
        assert is_own_file(path)
        write_output(path, SCORES, force=True)
        assert path.read_text() == SCORES


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scores.json", "{}"),
        ("scores.json", '{"suite": "mine"}'),
        ("scores.json", '{"suite": "unit", "model": "mine", "rows": [{"dataset": "a"}]}'),
        ("scores.json", '{"suite": "unit", "model": "mine", "rows": "many"}'),
        ("scores.json", "[" * 10_000),
        ("probe.json", '{"model": "mine", "seed": 1, "tasks": ["sort", "add"]}'),
        ("report.json", '{"recipe": "soup", "plan": "lunch", "checkpoint": 3}'),
        ("sweep.yaml", '{"model": "mine", "output": "out", "grid": [1, 2]}'),
        ("plan.json", '{"method": "agile", "family": "mine", "projections": []}'),
        ("latency.json", '{"key": "C major", "bench": {"wood": "oak"}}'),
        ("point.json", '{"id": 1, "label": "mine", "checkpoint": 2, "scores": []}'),
        ("fidelity.json", '{"datasets": [], "shift": 1, "drift": 2}'),
        ("profile.json", '{"model": "a", "family": "b", "epsilons": [], "weights": []}'),
        ("config.json", '{"model": "a", "model_type": "pretrained", "model_dtype": "float32"}'),
        ("config.json", '{"model_type": "t5", "architectures": []}'),
        ("provenance.json", '{"source": "mine"}'),
        ("provenance.json", '{"tscompress": "0", "source": "mine", "sha256": "none"}'),
        ("scores.csv", "date,value\n2020-01-01,1\n"),
        ("scores.csv", "dataset,model,MASE,WQL\nm4,mine,1,1\n"),  # as Chronos publishes them
        ("agg-rel-scores.csv", "benchmark,metric,value\nmine,MASE,1\n"),
        ("all_results.csv", "dataset,model,eval_metrics/MSE[mean]\na,mine,1\n"),  # of GIFT-Eval
        ("fev.csv", "model_name,colour\nCorsa,red\n"),
        ("ranks.csv", "matrix,part,kind,depth,role,head,mine\n"),
        ("sweep.csv", "number,id,label,price\n"),
        ("ratios.csv", "model,reference,dataset,metric,ratio,mine\n"),
        ("log.jsonl", '{"step": 1, "loss": 0.5}\n'),  # of any other training
        ("log.jsonl", '{"step": 1, "total_steps": 9, "loss": 0.5, "lr": 0.1}\n'),
        ("log.jsonl", '{"step": 1, "loss'),
        ("report.html", "<!doctype html>\n<title>mine</title>"),
        ("notes.txt", 'I saw <meta name="generator" content="tscompress 0.1.0"> there.'),
        ("page.html", '<!doctype html>\n<pre>&lt;meta name="generator" content="tscompress '),
        ("report.md", "# mine\n"),
        ("README.md", "# mine\nSave it and run `tscompress run recipe.yaml`:\n"),
        ("README.md", f"{mark_of(MARKDOWN)}\n{MARKDOWN}mine"),
        ("README.md", "# mine\n<!-- written by tscompress: 0123 -->\n"),
        ("recipe.yaml", "model: a\nmethod: fold\nfeed_forward: no\ncalibration: {}\n"),
        ("comparison.png", "\x89PNG mine"),
        ("comparison.png", "\x89PNG by Software\0tscompress itself"),
    ],
)
def test_files_of_others_are_not_ours_under_our_names(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    assert not is_own_file(path)
    with pytest.raises(OutputExistsError, match=name):
        write_output(path, SCORES, force=True)
    assert path.read_bytes() == text.encode("latin-1")


def test_half_a_figure_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = new_figure(1, 1)

    def cut_off(path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", cut_off)
    with pytest.raises(KeyboardInterrupt):
        save_figure(figure, tmp_path / "ranks.png")
    assert list(tmp_path.iterdir()) == []


def test_a_figure_is_known_by_its_software_and_not_by_its_name(tmp_path: Path) -> None:
    for name in ("recovery.png", "comparison.png", "worst.png", "mine.png"):
        path = tmp_path / name
        new_figure(1, 1).savefig(path)  # as anybody's
        assert not is_own_file(path)
        save_figure(new_figure(1, 1), path)
        assert is_own_file(path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("metadata", "ours"),
    [
        ({"step": "1", "config": "{}"}, False),
        ({"step": "1", "recipe": "soup"}, False),
        ({"format": "pt"}, False),
        ({"step": "1", "recipe": "{}", "parts": "[]"}, True),
        (dict.fromkeys(("step", "config", "models", "seconds", "held_out", "pending"), "1"), True),
    ],
)
def test_a_state_is_known_by_its_whole_record(
    tmp_path: Path, metadata: dict[str, str], ours: bool
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(2)}, path, metadata)
    assert is_own_file(path) is ours


def test_a_state_of_more_than_a_gigabyte_is_known(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"a": np.zeros(2)}, path, {"step": "1", "recipe": "{}", "parts": "[]"})
    notes = tmp_path / "scores.csv"
    notes.write_text("dataset,model,MASE,WQL\na,b,1,1\n")
    for large in (path, notes):
        os.truncate(large, 3 * 2**30)  # nothing of it is written
    assert is_own_file(path)
    assert not is_own_file(notes)


def test_tables_read_as_they_would_without_the_mark(tmp_path: Path) -> None:
    for frame in (
        pd.DataFrame({"dataset": ["a", 'b"c'], "value": [1.5, 2.0]}),
        pd.DataFrame({"dataset": [], "value": []}),
        pd.DataFrame({"two words": ["a"]}),
    ):
        plain = frame.to_csv(index=False, lineterminator="\n")
        again = pd.read_csv(io.StringIO(table_csv(frame)))
        pd.testing.assert_frame_equal(again, pd.read_csv(io.StringIO(plain)))
        assert list(csv.reader(table_csv(frame).splitlines())) == list(
            csv.reader(plain.splitlines())
        )
