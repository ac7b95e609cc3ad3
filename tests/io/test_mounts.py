"""Mounts that refuse what most file systems do, and memory of containers."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from own_checkpoint import made

from tscompress.benchmark.process_memory import peak_rss_bytes
from tscompress.checkpoints.locate import bare_name, is_local_path
from tscompress.io.files import new_directory, write_text_atomically
from tscompress.io.memory import available_bytes
from tscompress.training.loop import StopRequest


def refusing(code: int) -> Any:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.fixture
def old(tmp_path: Path) -> Path:
    directory = made(tmp_path / "parent" / "target")
    (directory / "folder").mkdir()
    return directory


def test_directories_that_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            refusing(errno.EINVAL)()
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    with new_directory(tmp_path / "out") as directory:
        (directory / "a.txt").write_text("new")
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))  # of a file it is an error
    with pytest.raises(Exception, match="Invalid argument"):
        write_text_atomically(tmp_path / "b.txt", "new")


def test_files_that_belong_to_another(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", refusing(errno.EPERM))
    write_text_atomically(tmp_path / "b.txt", "new")
    assert (tmp_path / "b.txt").read_text() == "new"
    for name in ("link", "chmod", "utime"):
        monkeypatch.setattr(os, name, refusing(errno.EPERM))
    with new_directory(old, force=True, writes=["b.txt"]) as directory:
        (directory / "b.txt").write_text("new")
    assert {path.name for path in old.iterdir()} >= {"a.txt", "b.txt", "folder"}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ({"memory.max": "3000", "memory.current": "1000"}, 2000 + 7),
        ({"memory.max": "3000", "memory.current": "4000"}, 0),
        ({"memory/memory.limit_in_bytes": "500", "memory/memory.usage_in_bytes": "1"}, 499 + 2),
        ({"memory.max": "max", "memory.current": "1000"}, 10**6),
        ({}, 10**6),
    ],
)
def test_a_limit_of_a_container_bounds_memory(
    content: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Memory:
        available = 10**6

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    statistics = "anon 1\ninactive_file 3\nactive_file 4\ntotal_inactive_file 2\n"
    content |= dict.fromkeys(("memory.stat", "memory/memory.stat"), statistics)
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert available_bytes(tmp_path) == left


def test_peak_memory_where_the_kernel_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "Name:\tpython\nVmRSS:\t1 kB\n")
    assert peak_rss_bytes() > 10**6


def test_signals_of_a_host_that_embeds_python_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with StopRequest():
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGTERM) is before


def test_paths_of_windows_are_local_paths_everywhere() -> None:
    assert is_local_path(r"C:\Users\someone\model")
    assert is_local_path("C:/Users/someone/model")
    assert is_local_path(r"models\small")
    assert bare_name(r"C:\Users\someone\model") == bare_name("//data/model") == "model"
    assert not is_local_path("amazon/chronos-t5-tiny")
