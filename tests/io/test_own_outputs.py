"""``--force`` replaces what tscompress wrote, and nothing else, whoever runs it."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from own_checkpoint import RECORD, record

from tscompress.errors import OutputError, OutputExistsError
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    write_output,
    write_text_atomically,
)
from tscompress.io.own_outputs import foreign_part, is_marked, is_own_file, mark_of
from tscompress.plotting import new_figure, save_figure

SCORES = json.dumps({"result": {"suite": "offline", "model": "a", "rows": []}})


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


@pytest.mark.parametrize("make", [*FOREIGN, make_scores], ids=named)
def test_no_checkpoint_takes_the_place_of_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "outputs" / "target"
    target.parent.mkdir()
    make(target)
    before = everything(tmp_path)
    with pytest.raises(OutputExistsError, match="target'"):
        check_output(target, force=True)
    with (
        pytest.raises(OutputExistsError, match="target'"),
        new_directory(target, force=True) as directory,
    ):
        (directory / "config.json").write_text("{}")
    assert everything(tmp_path) == before


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
def test_no_file_is_written_over_or_beside_what_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "outputs" / "target"
    target.parent.mkdir()
    make(target)
    before = everything(tmp_path)
    with pytest.raises(OutputExistsError, match="target'"):
        check_output(target, force=True, writes=[name])
    assert everything(tmp_path) == before


@pytest.mark.parametrize("make", FOREIGN, ids=named)
def test_no_file_takes_the_place_of_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "outputs" / "target"
    target.parent.mkdir()
    make(target)
    before = everything(tmp_path)
    for call in (
        lambda: check_file(target, force=True),
        lambda: write_output(target, "{}", force=True),
    ):
        with pytest.raises((OutputExistsError, OutputError), match="target'"):
            call()
    assert everything(tmp_path) == before


@pytest.mark.parametrize("make", SPECIAL, ids=named)
@pytest.mark.parametrize("linked", [False, True])
def test_what_a_library_call_writes_replaces_no_device(
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


def test_what_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "target")

    def slow() -> None:
        with new_directory(target, force=True) as directory:
            (directory / "config.json").write_text("{}")
            (target / "mine.txt").write_text("mine")

    with pytest.raises(OutputExistsError, match=r"mine\.txt"):
        slow()
    assert (target / "mine.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_the_same_holds_for_others_than_root(tmp_path: Path) -> None:
    """A child without privileges, who owns the directory and so could rename over everything."""
    root = tmp_path / "theirs"
    root.mkdir()
    for make in (make_file, make_directory, make_models, make_device, os.mkfifo):
        make(root / named(make))
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and path != Path(path.anchor) and not path.stat().st_mode & 1:
            path.chmod(path.stat().st_mode | 0o111)
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    before = everything(root)
    child = os.fork()
    if child == 0:  # pragma: no cover
        wrong = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            for path in root.iterdir():
                for check in (check_output, check_file):
                    try:
                        check(path, force=True)
                    except (OutputExistsError, OutputError):
                        continue
                    os._exit(2)
            check_output(root / "new", force=True)  # there it may write
            wrong = 0
        finally:
            os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert everything(root) == before


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


def test_what_else_lies_in_a_checkpoint_is_known_by_its_content(tmp_path: Path) -> None:
    ours = checkpoint(tmp_path / "ours")
    text = "---\nlicense: mit\n---\n"
    card = f"---\n{mark_of(text)}\n".join(["", text.removeprefix("---\n")])
    assert is_marked(card)
    (ours / "README.md").write_text(card)
    (ours / "recovery.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    save_figure(new_figure(1, 1), ours / "recovery.png")
    assert foreign_part(ours) is None
    (ours / "README.md").write_text(card + "mine")
    assert foreign_part(ours) == "README.md"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("scores.json", SCORES),
        ("profile.json", '{"model": "a", "family": "b", "epsilons": [0.1], "weights": []}'),
        ("probe.json", '{"result": {"model": "a", "seed": 0, "tasks": []}, "summary": {}}'),
        ("report.json", '{"recipe": {}, "checkpoint": "a", "plan": {}}'),
        ("report.html", '<!doctype html>\n<meta name="generator" content="tscompress 0.0.1">'),
        ("scores.csv", "dataset,model,MASE,WQL\na,b,1,1\n"),
        ("log.jsonl", '{"step": 1, "total_ste'),  # cut off as it was written
        ("recipe.yaml", "model: a\noutput: b\nmethod: fold\nfeed_forward: no\ncalibration: {}\n"),
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
        ("scores.json", "[" * 10_000),
        ("scores.csv", "date,value\n2020-01-01,1\n"),
        ("report.html", "<!doctype html>\n<title>mine</title>"),
        ("report.md", "# mine\n"),
        ("comparison.png", "\x89PNG mine"),
        ("config.json", '{"model_type": "t5", "architectures": []}'),
        ("provenance.json", '{"source": "mine"}'),
    ],
)
def test_files_of_others_are_not_ours_under_our_names(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert not is_own_file(path)
    with pytest.raises(OutputExistsError, match=name):
        write_output(path, SCORES, force=True)
    assert path.read_text() == text


def test_a_figure_of_before_is_known_by_name_and_software(tmp_path: Path) -> None:
    for name, ours in (("recovery.png", True), ("mine.png", False)):
        new_figure(1, 1).savefig(tmp_path / name)
        assert is_own_file(tmp_path / name) is ours
