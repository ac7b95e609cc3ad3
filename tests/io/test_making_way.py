"""Outputs that make way for others come back where these do not get done, also after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from own_checkpoint import RECORD, record

from tscompress.errors import OutputExistsError
from tscompress.io import making_way as module
from tscompress.io.files import new_directory
from tscompress.io.making_way import claimed, journal_of, making_way, undo_killed

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
def test_what_a_killed_process_replaced_is_as_it_was(tmp_path: Path, there: bool, at: str) -> None:
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
@pytest.mark.parametrize("step", ["_end", "remove"])
def test_a_kill_at_the_end_leaves_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, step: str
) -> None:
    out = tmp_path / "out"

    before = contents(tmp_path)
    owner = module.Claim if step == "_end" else module
    with monkeypatch.context() as patch:
        original = getattr(owner, step)

        def last(*given: object) -> None:
            aside = out / ".small.tscompress-before"
            if step == "_end" or (aside.exists() and (out / "small").exists()):
                kill_now()
            original(*given)

        patch.setattr(owner, step, last)
        killed(lambda: replace(tmp_path))
    undo_killed([out / "small", out / "report.json"])
    if step == "_end":
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
def test_what_was_changed_since_the_kill_is_not_undone(tmp_path: Path, there: bool) -> None:
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
    paths = [tmp_path / "small", tmp_path / "report.json"]
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        code = 1
        try:
            with making_way(paths):
                checkpoint(paths[0], "new")
                os.write(ready[1], b"x")
                os.read(go[0], 1)
            code = 0
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    before = contents(tmp_path)
    for act in (undo_killed, lambda given: claimed(given).__enter__()):
        with pytest.raises(OutputExistsError, match=r"another process writes to .*small"):
            act(paths)
    assert contents(tmp_path) == before
    os.write(go[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert contents(tmp_path) == {"small/config.json": "new"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"small": 1', "null", "\x00"])
def test_a_journal_that_was_cut_off_undoes_nothing(tmp_path: Path, content: str) -> None:
    small = checkpoint(tmp_path / "small", "old")
    journal_of(small).write_text(content)
    undo_killed([small])
    assert contents(tmp_path) == {"small/config.json": "old"}
    assert not journal_of(small).exists()


def test_a_journal_reaches_nothing_but_the_outputs_of_its_work(tmp_path: Path) -> None:
    small, other = checkpoint(tmp_path / "small", "old"), checkpoint(tmp_path / "other", "old")
    journal_of(small).write_text('{"other": false, "../x": false}')
    undo_killed([small])
    assert other.is_dir()


@pytest.mark.parametrize("crash", [RuntimeError, KeyboardInterrupt, None])
def test_what_makes_way_comes_back_after_a_failure(
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
