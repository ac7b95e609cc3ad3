"""Writing is all or nothing."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tscompress import files
from tscompress.errors import OutputError, OutputExistsError
from tscompress.files import check_output, new_directory, write_text_atomically


def contents(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory with a file, alone in its parent."""
    directory = tmp_path / "parent" / "target"
    directory.mkdir(parents=True)
    (directory / "a.txt").write_text("old")
    return directory


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
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    with pytest.raises(OSError, match="disk gone"), new_directory(old, force=True) as directory:
        (directory / "b.txt").write_text("new")
    assert contents(old.parent) == {"target/a.txt": "old"}


def test_what_is_there_is_refused_before_the_block_runs(old: Path) -> None:
    with (
        pytest.raises(OutputExistsError, match=r"exists already; choose another .* --force"),
        new_directory(old),
    ):
        pytest.fail("the block ran")
    with pytest.raises(OutputExistsError, match="exists already"):
        check_output(old / "a.txt", force=False)
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
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
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
        assert contents(first) == {"a.txt": "first"}
    assert contents(old.parent) == {"target/a.txt": "first"}


def test_a_target_that_was_moved_aside_comes_back(old: Path) -> None:
    old.rename(old.with_name(".target.tscompress-old"))  # killed between two renames
    with pytest.raises(OutputExistsError), new_directory(old):
        pytest.fail("the block ran")
    assert contents(old.parent) == {"target/a.txt": "old"}


def test_what_appears_meanwhile_is_not_replaced_without_force(tmp_path: Path) -> None:
    def slow() -> None:
        with new_directory(tmp_path / "target") as directory:
            (directory / "a.txt").write_text("slow")
            with new_directory(tmp_path / "target") as other:
                (other / "a.txt").write_text("fast")

    with pytest.raises(OutputExistsError, match="exists already"):
        slow()
    assert contents(tmp_path) == {"target/a.txt": "fast"}


def test_keep_leaves_what_the_block_does_not_write(old: Path) -> None:
    (old / "sub").mkdir()
    (old / "sub" / "c.txt").write_text("old")
    with new_directory(old, force=True, keep=True) as directory:
        (directory / "a.txt").write_text("new")
        (directory / "b.txt").write_text("new")
    assert contents(old) == {"a.txt": "new", "b.txt": "new", "sub/c.txt": "old"}


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_force_replaces_what_is_no_directory(old: Path, kind: str) -> None:
    target = old.parent / "other"
    if kind == "file":
        target.write_text("old")
    else:
        target.symlink_to(old if kind == "link" else old / "nothing")
    with new_directory(target, force=True) as directory:
        (directory / "b.txt").write_text("new")
    assert contents(target) == {"b.txt": "new"}
    assert not target.is_symlink()
    assert contents(old) == {"a.txt": "old"}
    assert sorted(p.name for p in old.parent.iterdir()) == ["other", "target"]


def test_a_target_below_a_file_is_one_line(old: Path) -> None:
    match = r"cannot be written: Not a directory; make room, or choose another output\.$"
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
