"""Outputs that make way for others come back where these do not get done, also after a kill."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from full_disk import full_disk
from other_process import claimed_elsewhere
from own_checkpoint import RECORD, record
from replaced import making_way

from tscompress.errors import OutputExistsError
from tscompress.io import making_way as module
from tscompress.io.files import new_directory
from tscompress.io.making_way import claimed, journal_of, undo_killed

PAGE, NEW_PAGE = (
    f'{{"recipe": {{}}, "checkpoint": "{name}", "plan": {{}}, "attention_parameter_ratio": 0.5, '
    '"relative": null}'
    for name in "ab"
)


def checkpoint(directory: Path, content: str) -> Path:
    """As tscompress writes one, in small."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(content)
    record(directory)
    return directory


def contents(root: Path) -> dict[str, str]:
    files = (path for path in root.rglob("*") if path.is_file() and path.name != RECORD)
    return {str(path.relative_to(root)): path.read_text() for path in files}


def killed(work: Callable[[], None]) -> None:
    """Run it in a process that kills itself, or fails the test."""
    child = os.fork()
    if child == 0:  # pragma: no cover
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def kill_now() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def there(tmp_path: Path, request: pytest.FixtureRequest) -> bool:
    """Whether a checkpoint and a page of before are in ``out``."""
    (tmp_path / "out").mkdir()
    if request.param:
        checkpoint(tmp_path / "out" / "small", "old")
        (tmp_path / "out" / "report.json").write_text(PAGE)
    return bool(request.param)


def replace(root: Path, at: str = "") -> None:
    """A work that replaces both, and is killed after a step."""
    out = root / "out"
    with making_way([out / "small", out / "report.json"]):
        if at == "moved":
            kill_now()
        with new_directory(out / "small") as directory:
            (directory / "config.json").write_text("new")
            record(directory)
        if at == "measuring":
            kill_now()
        (out / "report.json").write_text(NEW_PAGE)
        if at == "written":
            kill_now()


@pytest.mark.parametrize("there", [False, True], indirect=True, ids=["new", "replace"])
@pytest.mark.parametrize("at", ["moved", "measuring", "written"])
def test_outputs_that_a_killed_process_replaced_come_back(
    tmp_path: Path, there: bool, at: str
) -> None:
    before = contents(tmp_path)
    killed(lambda: replace(tmp_path, at))
    out = tmp_path / "out"
    assert contents(tmp_path) != before
    undo_killed([out / "small", out / "report.json"])
    assert contents(tmp_path) == before
    replace(tmp_path)
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "small"]
    assert (out / "small" / "config.json").read_text() == "new"


@pytest.mark.parametrize("there", [True], indirect=True)
@pytest.mark.parametrize("step", ["_mark", "remove"])
def test_a_kill_at_the_end_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, step: str
) -> None:
    out = tmp_path / "out"

    before = contents(tmp_path)
    owner = module.Claim if step == "_mark" else module
    with monkeypatch.context() as patch:
        original = getattr(owner, step)

        def last(*given: object) -> None:
            aside = out / ".small.tscompress-before"
            if step == "_mark" or (aside.exists() and (out / "small").exists()):
                kill_now()
            original(*given)

        patch.setattr(owner, step, last)
        killed(lambda: replace(tmp_path))
    undo_killed([out / "small", out / "report.json"])
    if step == "_mark":
        assert contents(tmp_path) == before
    else:
        assert contents(out) == {"report.json": NEW_PAGE, "small/config.json": "new"}


@pytest.mark.parametrize("there", [False, True], indirect=True, ids=["new", "replace"])
def test_an_undo_that_is_killed_is_done_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    before = contents(tmp_path)
    paths = [tmp_path / "out" / "small", tmp_path / "out" / "report.json"]
    killed(lambda: replace(tmp_path, "written"))
    for name in ("foreign_part", "remove", "is_own_file"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_: kill_now())
            killed(lambda: undo_killed(paths))
    undo_killed(paths)
    left = {name for name in contents(tmp_path) if not name.startswith("out/.small.")}
    assert left == set(before)
    replace(tmp_path)  # which removes what is left
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json", "small"]


@pytest.mark.parametrize("there", [False, True], indirect=True, ids=["new", "replace"])
def test_changes_since_the_kill_are_not_undone(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    killed(lambda: replace(tmp_path, "measuring"))
    (out / "small" / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    for act in (lambda: undo_killed([out / "small"]), lambda: replace(tmp_path)):
        with pytest.raises(OutputExistsError, match=r"mine\.txt"):
            act()
        assert contents(tmp_path) == before
    (out / "small" / "mine.txt").rename(tmp_path / "mine.txt")
    replace(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True], indirect=True, ids=["new", "replace"])
def test_another_command_takes_the_place_of_what_was_killed(tmp_path: Path, there: bool) -> None:
    small = tmp_path / "out" / "small"
    killed(lambda: replace(tmp_path, "measuring"))
    with new_directory(small, force=True) as directory:
        (directory / "config.json").write_text("other")
        record(directory)
    undo_killed([small, tmp_path / "out" / "report.json"])  # nothing is left to undo
    assert (small / "config.json").read_text() == "other"
    assert not journal_of(small).exists()


def test_a_living_process_is_not_undone(tmp_path: Path) -> None:
    paths = [checkpoint(tmp_path / "small", "old"), tmp_path / "report.json"]
    before = contents(tmp_path)
    with claimed_elsewhere(paths):
        for act in (
            undo_killed,
            lambda given: claimed(given).__enter__(),
            lambda given: new_directory(given[0], force=True).__enter__(),
        ):
            with pytest.raises(OutputExistsError, match=r"another process writes to .*small'"):
                act(paths)
        assert contents(tmp_path) == {**before, journal_of(Path("small")).name: ""}
    assert contents(tmp_path) == before


def test_commands_of_one_output_leave_the_rest_to_the_next_run(tmp_path: Path) -> None:
    small, page, other = (tmp_path / "out" / name for name in ("small", "report.json", "other"))
    checkpoint(small, "old")
    page.write_text(PAGE)
    checkpoint(other, "other")
    killed(lambda: replace(tmp_path, "written"))
    with new_directory(small, force=True) as directory:
        (directory / "config.json").write_text("new")
        record(directory)
    undo_killed([small, page])
    assert contents(tmp_path / "out") == {
        "report.json": PAGE, "small/config.json": "new", "other/config.json": "other"
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Journals that no process wrote
# --------------------------------------------------------------------------------------------------

WORKS = {
    "undo": lambda small: undo_killed([small]),
    "replace": lambda small: making_way([small]).__enter__(),
    "write": lambda small: new_directory(small, force=True).__enter__(),
}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    "content",
    [
        b"{", b"[]", b'{"small": true', b"null", b"\x00", b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 100_000, b'{"small": 1}', b'{"small": null}', b'{"small": {}}', b"my notes",
        b'["small": true}', b'{"../x": false}', b'{"../x": true}', b'{"..": false}',
        b'{".": false}', b'{"small/../../x": false}', b'{"": false}', b'{"link/x": false}',
        b'{"a\\u0000b": false}', b'}"link/x": true}', b'{"\\ud800": true}', b'{"HERE/x": true}',
        b'}"HERE/x": true}', b'{"small": true, "HERE/x": false}',
    ],
)  # fmt: skip
def test_a_journal_that_no_process_wrote_is_reported_and_undoes_nothing(
    tmp_path: Path, work: str, content: bytes
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for name in ("x", ".x.tscompress-before"):
        checkpoint(outside / name, name)
        checkpoint(tmp_path / name, name)
    small = checkpoint(inside / "small", "new")
    (inside / "link").symlink_to(outside)
    journal_of(small).write_bytes(content.replace(b"HERE", str(outside).encode()))
    checkpoint(inside / ".small.tscompress-before", "old")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(OutputExistsError, match=f"{journal_of(small).name}' .*remove it"):
        WORKS[work](small)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        make_socket,
        Path.mkdir,
        lambda path: path.symlink_to("notes"),
        lambda path: path.symlink_to("nothing"),
        lambda path: os.link(path.with_name("notes"), path),
    ],
    ids=["pipe", "socket", "directory", "link", "dangling", "hard link"],
)
def test_a_journal_that_is_no_file_of_its_own_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = checkpoint(tmp_path / "small", "old")
    (tmp_path / "notes").write_text("mine")
    make(journal_of(small))
    kind = journal_of(small).lstat().st_mode
    with pytest.raises(OutputExistsError, match=f"{journal_of(small).name}' "):
        WORKS[work](small)
    assert journal_of(small).lstat().st_mode == kind
    assert (tmp_path / "notes").read_text() == "mine"
    assert (small / "config.json").read_text() == "old"
    assert not (tmp_path / "nothing").exists()


def test_an_empty_journal_is_of_a_process_that_moved_nothing(tmp_path: Path) -> None:
    small = checkpoint(tmp_path / "small", "old")
    journal_of(small).touch()
    undo_killed([small])
    assert contents(tmp_path) == {"small/config.json": "old"}


def test_a_journal_reaches_nothing_but_the_outputs_of_its_work(tmp_path: Path) -> None:
    small, other = checkpoint(tmp_path / "small", "old"), checkpoint(tmp_path / "other", "old")
    journal_of(small).write_text('{"other": false}')
    undo_killed([small])
    assert other.is_dir()


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("there", [False, True])
def test_files_where_outputs_make_way_to_stay(tmp_path: Path, work: str, there: bool) -> None:
    small = tmp_path / "small"
    if there:
        checkpoint(small, "new")
    checkpoint(tmp_path / ".small.tscompress-before", "old")
    before = contents(tmp_path)
    with pytest.raises(OutputExistsError, match=r"\.small\.tscompress-before"):
        WORKS[work](small)
    assert contents(tmp_path) == before


# --------------------------------------------------------------------------------------------------
# Failures
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crash", [RuntimeError, KeyboardInterrupt, None])
def test_outputs_come_back_after_a_failure(
    tmp_path: Path, crash: type[BaseException] | None
) -> None:
    old, new = checkpoint(tmp_path / "old", "{}"), tmp_path / "new.json"
    before = contents(tmp_path)

    def replace() -> None:
        with making_way([old, new]):
            assert not old.exists()
            old.mkdir()
            (old / "half").write_text("half")
            new.write_text("{}")
            if crash is not None:
                raise crash

    if crash is None:
        replace()
        assert sorted(contents(tmp_path)) == ["new.json", "old/half"]
    else:
        with pytest.raises(crash):
            replace()
        assert contents(tmp_path) == before


@pytest.mark.parametrize("there", [False, True], indirect=True, ids=["new", "replace"])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_full_disk_at_any_step_leaves_old_or_new(
    tmp_path: Path, there: bool, stays: bool
) -> None:
    paths = [tmp_path / "out" / "small", tmp_path / "out" / "report.json"]
    before = contents(tmp_path)
    for step in itertools.count(1):
        code = None
        with full_disk(step, stays=stays) as failed:
            try:
                replace(tmp_path)
            except OSError as error:
                code = error
        if not failed():
            break
        undo_killed(paths)
        if contents(tmp_path) != before:  # it had ended, but for what was to be deleted
            assert contents(paths[0]) == {"config.json": "new"}
            assert paths[1].read_text() == NEW_PAGE
            break
        assert "No space left" in str(code)
        assert not journal_of(paths[0]).exists()
    assert step > 5
    assert all(path.exists() for path in paths)
