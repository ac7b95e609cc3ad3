"""Writing is all or nothing."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from full_disk import full_disk
from own_checkpoint import RECORD, made, record

from tscompress.errors import OutputError, OutputExistsError, UsageError
from tscompress.io import files, making_way
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    user_path,
    write_text_atomically,
)
from tscompress.io.places import cannot_write

LOG = (
    '{"step": 1, "total_steps": 9, "seconds": 1.0, "eta_seconds": 1.0, "learning_rate": 0.1, '
    '"series_per_second": 1.0}'
)
"""Of a training, which tscompress knows for its own."""


def contents(root: Path) -> dict[str, str]:
    """Text by name, without the records that make directories our own."""
    files = (path for path in root.rglob("*") if path.is_file() and path.name != RECORD)
    return {str(path.relative_to(root)): path.read_text() for path in files}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return made(tmp_path / "parent" / "target")


def test_text_is_replaced_and_parents_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    for text in ("first", "zweite Zeile: ε\n"):
        write_text_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_failed_write_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "\ud800")
    assert contents(tmp_path) == {"file.txt": "old"}


def test_permissions_are_those_of_a_plain_file_and_directory(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a").touch()
    with new_directory(tmp_path / "made") as directory:
        write_text_atomically(directory / "a", "")
        (directory / "sub").mkdir()
        (directory / "sub" / "b").touch()
    for name in ("", "a"):
        made, plain = ((tmp_path / kind / name).stat().st_mode for kind in ("made", "plain"))
        assert stat.S_IMODE(made) == stat.S_IMODE(plain)


def test_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "some" / "where"
    with new_directory(target) as directory:
        (directory / "a.txt").write_text("new")
        assert not target.exists()
    assert contents(tmp_path) == {"some/where/a.txt": "new"}


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with new_directory(tmp_path / "target") as directory:
        (directory / "a.txt").write_text("new")
    assert contents(tmp_path) == {"target/a.txt": "new"}


def test_force_replaces_the_whole_directory(old: Path) -> None:
    with new_directory(old, force=True) as directory:
        (directory / "b.txt").write_text("new")
        assert contents(old) == {"a.txt": "old"}
    assert contents(old) == {"b.txt": "new"}
    assert [p.name for p in old.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("crash", [RuntimeError, KeyboardInterrupt])
def test_a_crash_in_the_block_leaves_the_old_directory_whole(
    old: Path, crash: type[BaseException]
) -> None:
    def half() -> None:
        with new_directory(old, force=True) as directory:
            (directory / "b.txt").write_text("half")
            raise crash

    with pytest.raises(crash):
        half()
    assert contents(old.parent) == {"target/a.txt": "old"}
    assert [p.name for p in old.parent.iterdir()] == ["target"]


def test_a_crash_between_the_renames_puts_the_old_directory_back(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp") and Path(target) == old and not old.exists():
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    monkeypatch.setattr(files, "exchange", lambda one, other: False)
    with pytest.raises(OSError, match="disk gone"), new_directory(old, force=True) as directory:
        (directory / "b.txt").write_text("new")
    assert contents(old.parent) == {"target/a.txt": "old"}


def test_existing_outputs_are_refused_before_the_block_runs(old: Path) -> None:
    with (
        pytest.raises(OutputExistsError, match=r"target.*--force"),
        new_directory(old),
    ):
        pytest.fail("the block ran")
    with pytest.raises(OutputExistsError, match="exists already"):
        check_file(old / RECORD, force=False)
    check_output(old, force=True)
    check_output(old / "nothing", force=False)
    assert contents(old) == {"a.txt": "old"}


def leave_behind(parent: Path) -> Path:
    """What a killed process leaves beside ``target``."""
    leftover = parent / ".target.abcd_123.tmp"
    leftover.mkdir(parents=True)
    (leftover / "half.txt").write_text("half")
    return leftover


@pytest.mark.parametrize("exchange", [True, False])
def test_leftovers_of_killed_processes_are_removed(
    old: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    leave_behind(old.parent)
    (old.parent / ".target.mine.tmp").mkdir()  # not a name of ours
    with new_directory(old, force=True) as directory:
        (directory / "b.txt").write_text("new")
    assert contents(old.parent) == {"target/b.txt": "new"}
    assert sorted(p.name for p in old.parent.iterdir()) == [".target.mine.tmp", "target"]


def test_the_sibling_of_a_process_that_lives_is_left_alone(old: Path) -> None:
    with new_directory(old, force=True) as first:
        (first / "a.txt").write_text("first")
        with new_directory(old, force=True) as second:
            (second / "a.txt").write_text("second")
            record(second)
        assert contents(first) == {"a.txt": "first"}
    assert contents(old.parent) == {"target/a.txt": "first"}


def test_a_target_that_was_moved_aside_comes_back(old: Path) -> None:
    old.rename(old.with_name(".target.tscompress-old"))  # killed between two renames
    with pytest.raises(OutputExistsError), new_directory(old):
        pytest.fail("the block ran")
    assert contents(old.parent) == {"target/a.txt": "old"}


def test_files_that_appear_meanwhile_are_not_replaced_without_force(tmp_path: Path) -> None:
    def slow() -> None:
        with new_directory(tmp_path / "target") as directory:
            (directory / "a.txt").write_text("slow")
            with new_directory(tmp_path / "target") as other:
                (other / "a.txt").write_text("fast")

    with pytest.raises(OutputExistsError, match="exists already"):
        slow()
    assert contents(tmp_path) == {"target/a.txt": "fast"}


def test_files_outside_the_block_stay(old: Path) -> None:
    (old / "sub").mkdir()
    (old / "sub" / "c.txt").write_text("old")
    (old / "log").write_text(LOG)
    with new_directory(old, force=True, writes=["log"]) as directory:
        (directory / "log").write_text("new")
        (directory / "b.txt").write_text("new")
    assert contents(old) == {"a.txt": "old", "log": "new", "b.txt": "new", "sub/c.txt": "old"}


def test_files_of_an_earlier_run_alone_go(old: Path) -> None:
    for name in ("log", "more"):
        (old / name).write_text(LOG)
    with new_directory(old, force=True, writes=["log", "more"]) as directory:
        (directory / "log").write_text(LOG * 2)
    assert contents(old) == {"a.txt": "old", "log": LOG * 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_additions_of_another_process_are_refused_or_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, put, codes = tmp_path / "target", files.put, list[int]()

    def add(name: str) -> None:
        with new_directory(target, force=True, writes=[name]) as directory:
            (directory / name).write_text(LOG)

    def in_child() -> int:
        child = os.fork()
        if child == 0:  # pragma: no cover
            monkeypatch.undo()
            making_way.CLAIMED.clear()  # of the parent
            code = 1
            try:
                add("theirs")
                code = 0
            except OutputExistsError:
                code = 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def late(*given: Any, **options: Any) -> bool:
        codes.append(in_child())
        return put(*given, **options)

    add("first")
    monkeypatch.setattr(files, "put", late)
    add("ours")
    assert codes in ([0], [2])
    kept = {"theirs"} if codes == [0] else set()
    assert contents(target).keys() == {"first", "ours"} | kept
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_that_stay_keep_their_permissions(old: Path, umask: int) -> None:
    (old / "bin").mkdir()
    (old / "log").write_text(LOG)
    modes = {"log": 0o600, "b.txt": 0o640, "bin": 0o750, "bin/run": 0o755, ".": 0o710}
    for name, mode in modes.items():
        if not (old / name).exists():
            (old / name).write_text("mine")
        (old / name).chmod(mode)
    elsewhere = old.parent / "elsewhere"
    os.link(old / "bin" / "run", elsewhere)
    before = os.umask(umask)
    try:
        with new_directory(old, force=True, writes=["log"]) as directory:
            (directory / "log").write_text("new")
    finally:
        os.umask(before)
    modes["log"] = 0o666 & ~umask  # which is another file now
    assert {name: stat.S_IMODE((old / name).stat().st_mode) for name in modes} == modes
    assert elsewhere.samefile(old / "bin" / "run")


def test_no_directory_takes_the_place_of_a_file(old: Path) -> None:
    with pytest.raises(OutputExistsError, match="is a file"):
        check_output(old / RECORD, force=True)
    with pytest.raises(OutputError, match="Is a directory"):
        check_file(old, force=True)


@pytest.mark.parametrize("kind", ["full", "empty", "dangling"])
def test_a_link_stands_for_what_it_points_to(old: Path, tmp_path: Path, kind: str) -> None:
    disk, link = tmp_path / "disk", old.parent / "link"
    if kind != "dangling":
        (disk / "real").mkdir(parents=True)
    link.symlink_to(disk / "real")
    if kind == "full":
        (disk / "real" / "a.txt").write_text("old")
        record(disk / "real")
        with pytest.raises(OutputExistsError, match=r"link' exists already; .* --force"):
            check_output(link, force=False)
    else:
        check_output(link, force=False)
    with new_directory(link, force=kind == "full") as directory:
        (directory / "b.txt").write_text("new")
        assert directory.parent == disk
    assert link.is_symlink()
    assert contents(disk) == {"real/b.txt": "new"}
    assert sorted(p.name for p in disk.iterdir()) == ["real"]


def test_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(OutputError, match="link'"):
        check_output(tmp_path / "link", force=True)


# --------------------------------------------------------------------------------------------------
# Inputs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["target", "target/a.txt", "link", "link/a.txt", "target/link2"])
@pytest.mark.parametrize("output", ["target", "link", "."])
def test_no_input_is_replaced(
    old: Path, monkeypatch: pytest.MonkeyPatch, given: str, output: str
) -> None:
    monkeypatch.chdir(old.parent.parent)
    (old.parent / "link").symlink_to(old)
    (old / "link2").symlink_to("a.txt")
    target = old.parent / output
    how = "is" if {given, output} <= {"target", "link"} else "holds"
    match = rf"{target.name}' {how} the input '[^']*{given}', which would be lost; choose another"
    for source in (old.parent / given, Path("parent") / given, f"parent/{given}"):
        with pytest.raises(OutputExistsError, match=match):
            check_output(target, force=True, inputs=[None, "owner/model", "", source])
        with (
            pytest.raises(OutputExistsError, match=match),
            new_directory(target, force=True, inputs=[source]),
        ):
            pytest.fail("the block ran")
    assert contents(old)["a.txt"] == "old"


def test_an_input_at_home_is_not_replaced(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(old.parent))
    with pytest.raises(OutputExistsError, match="~/target"):
        check_output(old, force=True, inputs=["~/target"])


def test_files_that_are_no_input_may_be_replaced(old: Path) -> None:
    (old / "sub").mkdir()
    (old / "sub" / "b.txt").write_text("old")
    record(old / "sub")
    for target in (old / "sub", old.parent / "nothing", old / "c.txt"):
        check_output(target, force=True, inputs=[old, old / "a.txt"])
    with pytest.raises(OutputExistsError, match=r"a\.txt' .*target'"):
        check_file(old / "a.txt", force=True, inputs=[old])


def test_no_input_is_written_over(old: Path) -> None:
    (old / "log").write_text(LOG)
    inputs = [old / "log"]

    def write(name: str) -> None:
        with new_directory(old, force=True, writes=[name], inputs=inputs) as directory:
            (directory / name).write_text("new")

    write("new.txt")
    assert contents(old) == {"a.txt": "old", "log": LOG, "new.txt": "new"}
    with pytest.raises(OutputExistsError, match=r"target/log' .*log'"):
        write("log")
    with pytest.raises(OutputExistsError, match=r"target' .*target'"):
        check_output(old, force=True, writes=["log"], inputs=[old])
    assert contents(old) == {"a.txt": "old", "log": LOG, "new.txt": "new"}
    assert [p.name for p in old.parent.iterdir()] == ["target"]


# --------------------------------------------------------------------------------------------------
# What cannot be an output
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "make room, or choose another output."),
        (errno.EDQUOT, "make room, or choose another output."),
        (errno.EACCES, "choose another output."),
        (errno.EBUSY, "choose another output."),
        (errno.ENAMETOOLONG, "choose another output."),
    ],
)
def test_advice_fits_the_trouble(code: int, advice: str) -> None:
    reason = os.strerror(code)
    assert str(cannot_write(Path("x"), reason)) == f"'x' cannot be written: {reason}; {advice}"


@pytest.mark.parametrize("name", ["b\udcff", "a\0b"])
@pytest.mark.parametrize("force", [False, True])
def test_a_name_that_no_record_can_hold_is_refused(tmp_path: Path, name: str, force: bool) -> None:
    match = r"' is no name in UTF-8, in which records name it; choose another output\.$"
    with pytest.raises(UsageError, match=match):
        check_output(tmp_path / name, force=force)
    with pytest.raises(UsageError, match=match), new_directory(tmp_path / name, force=force):
        pytest.fail("the block ran")
    assert list(tmp_path.iterdir()) == []


def test_a_name_too_long_for_what_lies_beside_it_is_refused(tmp_path: Path) -> None:
    check_output(tmp_path / ("n" * 200), force=False)
    for length in (250, 300):
        with pytest.raises(OutputError, match=r"nnn' .*too long"):
            check_output(tmp_path / ("n" * length), force=False)


@pytest.mark.parametrize("name", ["target", "empty", "new"])
def test_a_parent_that_is_read_only_is_said_at_once(
    old: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (old.parent / "empty").mkdir()
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != old.parent)
    with pytest.raises(OutputError, match=f"{name}' .*Permission"):
        check_output(old.parent / name, force=True)
    if name != "new":
        check_output(old.parent / name, force=True, writes=["log"], in_place=True)


def test_paths_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x") == user_path(Path("~/x")) == tmp_path / "x"
    assert user_path("~") == tmp_path
    assert user_path("~none-such/x") == Path("~none-such/x")  # as a shell leaves it
    assert user_path("a~/b") == Path("a~/b")
    with pytest.raises(UsageError, match="empty path"):
        user_path("")


def test_a_target_below_a_file_is_one_line(old: Path) -> None:
    match = r"cannot be written: Not a directory; choose another output\.$"
    with pytest.raises(OutputError, match=match):
        check_output(old / "a.txt" / "x", force=True)
    with pytest.raises(OutputError, match=match), new_directory(old / "a.txt" / "x"):
        pytest.fail("the block ran")
    with pytest.raises(OutputError, match="cannot be written"):
        write_text_atomically(old / "a.txt" / "x", "text")


def test_force_replaces_neither_home_nor_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, project = tmp_path / "home", tmp_path / "home" / "project"
    other = tmp_path / "other"
    for directory in (project, other):
        directory.mkdir(parents=True)
        (directory / "kept.txt").write_text("mine")
        record(directory)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    for target in (Path(), Path(".."), home, project, tmp_path):
        with (
            pytest.raises(OutputExistsError, match="home or the working directory"),
            new_directory(target, force=True),
        ):
            pass
    assert (project / "kept.txt").read_text() == "mine"
    with new_directory(other, force=True) as directory:
        (directory / "new.txt").write_text("new")
    assert [path.name for path in other.iterdir()] == ["new.txt"]


@pytest.mark.parametrize("force", [False, True])
def test_an_empty_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (Path(), Path("x/.."), tmp_path):
        with pytest.raises(OutputExistsError, match="is or holds the home or the working"):
            check_output(target, force=force)
        check_output(target, force=force, in_place=True)


# --------------------------------------------------------------------------------------------------
# No room
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("swaps", [False, True], ids=["renames", "swap"])
@pytest.mark.parametrize("writes", [None, ["log"]], ids=["whole", "beside"])
def test_a_full_disk_at_any_step_leaves_the_old_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stays: bool,
    swaps: bool,
    writes: list[str] | None,
) -> None:
    if not swaps:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    for step in itertools.count(1):
        old = tmp_path / str(step) / "target"
        old.mkdir(parents=True)
        (old / "a.txt").write_text("old")
        record(old)
        before = contents(old)
        refusal = None
        with full_disk(step, stays=stays) as failed:
            try:
                with new_directory(old, force=True, writes=writes) as directory:
                    (directory / "log").write_text(LOG)
            except OutputError as error:
                refusal = error
        if not failed():
            break
        if refusal is not None:
            assert re.search("target' cannot be written: No space left.*; make room", str(refusal))
        with suppress(OutputExistsError), new_directory(old):  # which puts back what was aside
            pytest.fail("the block ran")
        new = {**(before if writes else {}), "log": LOG}
        # Where a swap cannot be undone the new directory, which is whole, stays.
        assert contents(old.parent) in [
            {f"target/{name}": text for name, text in content.items()}
            for content in ([before, new] if stays or refusal is None else [before])
        ]
        assert [path.name for path in old.parent.iterdir()] == ["target"]
    assert step > 5
