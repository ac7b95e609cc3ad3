"""Killed, out of space, or two at once: what is written is old or new, and the next run works."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import PROCESSES
from hub_server import HubServer
from own_checkpoint import RECORD, record
from shared_fixtures import Command, assert_refused

from tscompress.api import compress
from tscompress.checkpoints import format as factored
from tscompress.checkpoints.load import load
from tscompress.cli import app as cli
from tscompress.errors import OutputError
from tscompress.io.files import check_output, new_directory, write_text_atomically
from tscompress.io.places import remove
from tscompress.training.checkpoint import TrainingState, save_training_state
from tscompress.workflows.save import save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of Linux")

SECONDS = 300
#: A run takes seconds, so that not every step of every command can have its kill.
EVERY = {"compressed": 1, "recovered": 7, "evaluated": 2}
#: What a step of writing looks like from outside.
EVENTS = ("open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir", "shutil.rmtree")


def hashes(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def run_command(
    arguments: list[str], log: Path, watched: str, kill_at: int, bytes_limit: int | None
) -> None:
    """In a process of its own: the command, and its death at a step of writing."""
    torch.set_num_threads(1)
    steps = 0

    def count(event: str, values: tuple[Any, ...]) -> None:
        nonlocal steps
        if event not in EVENTS or not str(values[0]).startswith(watched):
            return
        writes = event != "open" or (isinstance(values[2], int) and values[2] & os.O_ACCMODE)
        steps += bool(writes)
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    if kill_at:
        sys.addaudithook(count)
    if bytes_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_limit, bytes_limit))
    sys.argv = ["tscompress", *arguments]
    cli.main()


class Work:
    """A command with inputs that must not change and one output."""

    def __init__(self, root: Path, name: str, inputs: list[Path], *arguments: object) -> None:
        self.name, self.inputs = name, inputs
        self.output = root / "outputs" / name
        self.output.parent.mkdir(exist_ok=True)
        self.log = root / "log.txt"
        self.arguments = [*map(str, arguments), "--output", str(self.output)]
        self.before = [hashes(path) for path in inputs]

    def start(
        self, *, force: bool, kill_at: int = 0, limit: int | None = None
    ) -> ForkServerProcess:
        arguments = [*self.arguments, *(["--force"] if force else [])]
        watched = str(self.output.parent)
        process = PROCESSES.Process(
            target=run_command, args=(arguments, self.log, watched, kill_at, limit)
        )
        process.start()
        return process

    def finish(self, *, force: bool = False) -> None:
        """A run that nobody kills succeeds, and leaves its output alone there."""
        process = self.start(force=force)
        process.join(SECONDS)
        assert process.exitcode == 0, self.log.read_text()
        assert [path.name for path in self.output.parent.iterdir()] == [self.name]
        self.check_whole()

    def check_whole(self) -> None:
        if self.name == "evaluated":
            names = {"scores.csv", "scores.json", "agg-rel-scores.csv"}
            assert {path.name for path in self.output.iterdir()} == names
            assert all(path.stat().st_size for path in self.output.iterdir())
            return
        loaded = load(self.output)
        quantiles, _ = loaded.forecaster.predict_quantiles([torch.arange(40.0)], 3)
        assert torch.isfinite(quantiles[0]).all()

    def check(self, old: dict[str, str]) -> str:
        """After a kill: the inputs are as they were, the output is absent, old, or whole."""
        assert [hashes(path) for path in self.inputs] == self.before
        if not self.output.exists():
            assert not old, "the old output is gone"
            return "absent"
        if hashes(self.output) == old:
            return "old"
        self.check_whole()
        return "new"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crash")


@pytest.fixture(scope="module")
def works(root: Path, checkpoints: dict[str, Path]) -> dict[str, Work]:
    bolt = checkpoints["chronos-bolt"]
    small = root / "small"
    process = PROCESSES.Process(
        target=run_command,
        args=(
            ["compress", str(bolt), "--output", str(small), "--rank", "4",
             "--calibration-series", "6"], root / "log.txt", str(root), 0, None,
        ),
    )  # fmt: skip
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, (root / "log.txt").read_text()
    (root / "buckets.yaml").write_text(
        "steps: 4\ncheckpoint_steps: 1\nprecision: 'no'\nheld_out_series: 4\nwarmup_steps: 1\n"
        "evaluate_every: 2\nbuckets: [{context_length: 16, horizon: 8, batch_size: 2}]\n"
    )
    return {
        "compressed": Work(
            root, "compressed", [bolt],
            "compress", bolt, "--rank", 2, "--method", "svd",
        ),
        "recovered": Work(
            root, "recovered", [bolt, small],
            "recover", small, "--teacher", bolt, "--config", root / "buckets.yaml",
        ),
        "evaluated": Work(
            root, "evaluated", [bolt],
            "evaluate", bolt, "--dataset", "monash_m1_yearly", "--max-series", 2,
        ),
    }  # fmt: skip


def clear(work: Work) -> None:
    shutil.rmtree(work.output.parent)
    work.output.parent.mkdir()


def go_on(work: Work, old: dict[str, str], state: str) -> None:
    """The next run, with --force where there is something to replace, or a run to begin again."""
    unfinished = work.output.with_name(f"{work.name}.recovery").exists()
    work.finish(force=bool(old) or state == "new" or unfinished)


# --------------------------------------------------------------------------------------------------
# Killed
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed", "recovered", "evaluated"])
@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
def test_killed_at_every_step_of_writing(works: dict[str, Work], name: str, replace: bool) -> None:
    work = works[name]
    clear(work)
    states: list[str] = []
    for step in range(1, 500, EVERY[name]):
        if replace and not work.output.exists():
            work.finish()
        old = hashes(work.output) if replace else {}
        process = work.start(force=replace, kill_at=step)
        process.join(SECONDS)
        if process.exitcode == 0:  # there is no such step
            break
        assert process.exitcode == -signal.SIGKILL, work.log.read_text()
        states.append(work.check(old))
        if len(states) % 3 == 0:  # what one or several killed runs left does not hinder the next
            go_on(work, old, states[-1])
        for path in work.output.parent.iterdir():  # or the next run has more steps than this one
            if not replace or path != work.output:
                remove(path)
    assert len(states) >= 5
    print(f"{name}: killed {len(states)} times: {sorted(set(states))}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed", "recovered", "evaluated"])
def test_killed_at_random_times(works: dict[str, Work], name: str) -> None:
    work = works[name]
    clear(work)
    rng = random.Random(0)
    started = time.monotonic()
    work.finish()
    longest = time.monotonic() - started
    kills = 0
    for trial in range(6):
        replace = trial % 2 == 0
        if not replace:
            clear(work)
        elif not work.output.exists():
            work.finish()
        old = hashes(work.output) if replace else {}
        process = work.start(force=replace)
        process.join(rng.uniform(0.1, 1.0) * longest)
        kills += process.is_alive()
        process.kill()
        process.join()
        state = work.check(old)
        go_on(work, old, state)
    print(f"{name}: killed {kills} times")


# --------------------------------------------------------------------------------------------------
# Killed on the way up
# --------------------------------------------------------------------------------------------------

#: Imports once, then a process for each push: its id, and how it ended.
FORKER = """
import os, sys
from tscompress.hub import card
from tscompress.cli import app as cli
from tscompress.hub import push
from tscompress.checkpoints import load
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        sys.argv = ["tscompress", "push", *line.split()]
        os.dup2(2, 1)
        try:
            cli.main()
        except SystemExit as stop:
            os._exit(stop.code or 0)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


@dataclass
class Pusher:
    """Pushes one directory to a Hub on localhost, in processes that may be killed."""

    hub: HubServer
    directory: Path
    process: subprocess.Popen[str]

    def push(self, repo_id: str, *, step: int = 0, seconds: float | None = None) -> int:
        """Push, kill it at a step of the server or after some time; the signal or exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        started = threading.Event()
        found: list[int] = []
        count = itertools.count(1)

        def kill() -> None:
            started.wait(SECONDS)
            with suppress(ProcessLookupError):
                os.kill(found[0], signal.SIGKILL)

        self.hub.on_step = lambda _: kill() if next(count) == step else None
        timer = threading.Timer(seconds or 0, kill)
        self.process.stdin.write(f"{self.directory} {repo_id}\n")
        self.process.stdin.flush()
        found.append(int(self.process.stdout.readline()))
        started.set()
        if seconds is not None:
            timer.start()
        status = int(self.process.stdout.readline())
        timer.cancel()
        self.hub.on_step = lambda _: None
        return os.waitstatus_to_exitcode(status)

    def check(self, repo_id: str, before: dict[str, str]) -> bool:
        """Local files are as they were, commits are whole; whether there is one."""
        card = self.directory / "README.md"
        assert hashes(self.directory) | {"README.md": ""} == before | {"README.md": ""}
        assert not card.exists() or card.read_text().endswith("\n")
        whole = {path.name: path.read_bytes() for path in self.directory.iterdir()}
        repository = self.hub.repositories.get(repo_id)
        commits = [] if repository is None else list(repository.commits.values())[1:]
        for files in commits:  # after the first, which creating it makes
            assert {name: c for name, c in files.items() if name != ".gitattributes"} == whole
        assert len(commits) <= 1
        return bool(commits)


@pytest.fixture(scope="module")
def pusher(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pusher]:
    root = tmp_path_factory.mktemp("pusher")
    output = save(compress(checkpoints["chronos-bolt"], method="svd", rank=3), root / "small")
    server = HubServer()
    server.multipart_bytes = 20_000
    server.tokens = {"hf_nobody": ("alice",)}
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(root / "home"), "HF_TOKEN": "hf_nobody",
                "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    with server.running():
        process = subprocess.Popen(
            [sys.executable, "-c", FORKER], env={**os.environ, **settings}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        yield Pusher(server, output, process)
        process.communicate()


def push_again(pusher: Pusher, repo_id: str, before: dict[str, str]) -> None:
    """What a killed push left does not hinder the next, which makes the one commit, or finds it."""
    assert pusher.push(repo_id) == 0
    assert pusher.check(repo_id, before)
    assert len(pusher.hub.repositories[repo_id].commits) == 2
    for path in pusher.directory.parent.iterdir():
        assert path.name in ("small", "home")


@pytest.mark.slow
def test_pushes_killed_at_every_step_of_the_server(pusher: Pusher) -> None:
    before = hashes(pusher.directory)
    committed = []
    for step in range(1, 200):
        repo_id = f"alice/step-{step}"
        pusher.hub.lfs.clear()
        pusher.hub.parts.clear()
        (pusher.directory / "README.md").unlink(missing_ok=True)
        code = pusher.push(repo_id, step=step)
        if code == 0:  # there is no such step
            break
        assert code == -signal.SIGKILL
        committed.append(pusher.check(repo_id, before))
        push_again(pusher, repo_id, before)
    assert len(committed) >= 16
    # The last step is before the answer to a commit that was made.
    assert sorted(committed) == committed
    assert (committed[0], committed[-1]) == (False, True)
    print(f"push: killed {len(committed)} times, {sum(committed)} after the commit")


@pytest.mark.slow
def test_pushes_killed_at_random_times(pusher: Pusher) -> None:
    before = hashes(pusher.directory)
    (pusher.directory / "README.md").unlink(missing_ok=True)
    pusher.hub.lfs.clear()
    started = time.monotonic()
    assert pusher.push("alice/whole") == 0
    longest = time.monotonic() - started
    rng = random.Random(0)
    kills = 0
    for trial in range(12):
        pusher.hub.lfs.clear()
        (pusher.directory / "README.md").unlink(missing_ok=True)
        code = pusher.push(f"alice/time-{trial}", seconds=rng.uniform(0.1, 1.0) * longest)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        pusher.check(f"alice/time-{trial}", before)
        push_again(pusher, f"alice/time-{trial}", before)
    print(f"push: killed {kills} times")


# --------------------------------------------------------------------------------------------------
# Two at once
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["compressed", "recovered", "evaluated"])
def test_two_at_once_leave_one_whole(works: dict[str, Work], name: str, force: bool) -> None:
    work = works[name]
    for _ in range(3):
        clear(work)
        processes = [work.start(force=force) for _ in range(2)]
        for process in processes:
            process.join(SECONDS)
        codes = sorted(process.exitcode or 0 for process in processes)
        # The second is refused while the first compresses, trains or evaluates.
        assert codes in ([[0, 0], [0, 2]] if force else [[0, 2]])
        assert [path.name for path in work.output.parent.iterdir()] == [name]
        work.check_whole()


def replace_often(target: Path, word: str, count: int) -> None:
    for _ in range(count):
        with new_directory(target, force=True) as directory:
            for number in range(5):
                (directory / str(number)).write_text(word)
            record(directory)


def test_directories_replaced_by_two_processes_are_never_mixed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    replace_often(target, "zero", 1)
    writers = [
        PROCESSES.Process(target=replace_often, args=(target, word, 15)) for word in ("one", "two")
    ]
    for writer in writers:
        writer.start()
    seen: set[str] = set()
    while any(writer.is_alive() for writer in writers):
        descriptor = os.open(target, os.O_RDONLY)  # the target is there at every moment
        try:
            with os.scandir(descriptor) as entries:
                names = sorted(entry.name for entry in entries)
        finally:
            os.close(descriptor)
        seen |= set(names)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen <= {RECORD, *map(str, range(5))}
    words = {path.read_text() for path in target.iterdir() if path.name != RECORD}
    assert len(words) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


# --------------------------------------------------------------------------------------------------
# No space, no permission
# --------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    """A file system of a few bytes; skips where mounting is not allowed."""
    where.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    if mount is None or subprocess.run([mount, *options], capture_output=True).returncode:
        pytest.skip("no permission to mount")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_is_one_line(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    command: Command,
    force: bool,
) -> None:
    with small_disk(tmp_path / "disk", "48k") as disk:
        if force:
            (disk / "small").mkdir()
            (disk / "small" / "old.txt").write_text("old")
            record(disk / "small")
        outcome = command(
            "compress", checkpoints["chronos-bolt"], "--method", "svd", "--rank", 2,
            "--output", disk / "small", *(["--force"] if force else []),
        )  # fmt: skip
        assert_refused(outcome, 1, "small' cannot be written: No space left on device; make room")
        left = [str(path.relative_to(disk)) for path in disk.rglob("*")]
        old = ["small", "small/old.txt", f"small/{RECORD}"]
        assert sorted(left) == (old if force else [])


@pytest.mark.parametrize("verb", ["compress", "evaluate", "profile", "recover"])
def test_a_mount_point_is_refused_before_any_work(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
) -> None:
    bolt = checkpoints["chronos-bolt"]
    options = {"compress": ["--rank", 2, "--method", "svd"], "recover": ["--teacher", bolt]}
    with small_disk(tmp_path / "disk", "48k") as disk, monkeypatch.context() as patch:
        patch.setattr(
            "tscompress.checkpoints.load.find", lambda *_, **__: pytest.fail("a model was loaded")
        )
        outcome = command(verb, bolt, "--output", disk, *options.get(verb, []))
        assert_refused(outcome, 2, f"choose an output in it, such as '{disk / 'output'}'.")
        assert list(disk.iterdir()) == []
        check_output(disk, force=False, in_place=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed", "recovered", "evaluated"])
@pytest.mark.parametrize("limit", [0, 100, 20_000])
def test_files_that_may_not_grow(works: dict[str, Work], name: str, limit: int) -> None:
    work = works[name]
    clear(work)
    work.finish()
    old = hashes(work.output)
    process = work.start(force=True, limit=limit)
    process.join(SECONDS)
    assert process.exitcode == (0 if name == "evaluated" and limit == 20_000 else 1)
    log = work.log.read_bytes().decode()
    assert "Traceback" not in log
    assert "unexpected" not in log
    assert work.check(old) in ("old", "new")


def test_a_write_that_fails_names_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"x\.txt.*No space left"):
        write_text_atomically(tmp_path / "x.txt", "text")
    with (
        pytest.raises(OutputError, match=r"target.*No space left"),
        new_directory(tmp_path / "target") as directory,
    ):
        (directory / "a").touch()
    assert not list(tmp_path.iterdir())
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(OSError, match="No space left"):
        save_training_state(tmp_path / "checkpoint", model, optimizer, TrainingState(1, {}))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot be written: Not a directory"):
        factored.save_tensors({}, tmp_path / "file" / "x.safetensors", {})


@pytest.mark.parametrize("verb", ["compress", "evaluate", "profile"])
def test_a_target_that_cannot_be_is_refused_before_any_work(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    command: Command,
    verb: str,
) -> None:
    (tmp_path / "file").touch()
    options = ["--rank", 2, "--method", "svd"] if verb == "compress" else []
    bolt = checkpoints["chronos-bolt"]
    output = tmp_path / "file" / "out"
    outcome = command(verb, bolt, "--output", output, *options)
    assert_refused(outcome, 1, "out' cannot be written: Not a directory")
    if verb == "compress":  # root may write to /proc by its permissions; the kernel does not let it
        outcome = command(verb, bolt, "--output", "/proc/none/out", *options)
        assert_refused(outcome, 1, "out' cannot be written: ")
