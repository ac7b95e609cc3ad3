"""Virtual environments, one for each library, made by pip and kept for the next run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from packaging.version import Version

from tscompress.io.files import write_text_atomically

MEGABYTE = 1e6
#: What its versions are recorded of, wherever it is installed.
RECORDED = (
    "torch",
    "transformers",
    "chronos-forecasting",
    "numpy",
    "pandas",
    "autogluon.timeseries",
    "sktime",
    "darts",
    "gluonts",
    "fev",
    "datasets",
    "tscompress",
)


class InstallError(Exception):
    """pip could not make an environment; the message is its reason, in one line."""


@dataclass(frozen=True)
class Environment:
    """An environment that is there, and what it took to make it."""

    directory: str
    seconds: float
    megabytes: float
    versions: dict[str, str]
    complaints: list[str]  # lines of `pip check`

    @property
    def python(self) -> Path:
        return python_of(Path(self.directory))


def python_of(directory: Path) -> Path:
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def make_environment(
    directory: Path,
    requirements: tuple[str, ...],
    *,
    base: Environment | None = None,
    time_limit_s: float,
) -> Environment:
    """Install ``requirements`` into a new environment, or return the one that is there.

    With ``base``, the new one sees the packages of the base, and pip adds what is missing: the base
    stays as it was.

    Raises
    ------
    InstallError
        pip refused the requirements, or took longer than ``time_limit_s``.
    """
    record = directory / "environment.json"
    if record.exists():
        return Environment(**json.loads(record.read_text()))
    if directory.exists():  # of a run that was stopped
        shutil.rmtree(directory)
    started = time.perf_counter()
    venv.create(directory, with_pip=True, symlinks=os.name != "nt")
    python = python_of(directory)
    packages = Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    if base is not None:
        base_packages = _ask(base.python, "import sysconfig; print(sysconfig.get_path('purelib'))")
        # Not the bare path: site then also reads the path files of the base.
        line = f"import site; site.addsitedir({base_packages!r})\n"
        (packages / "base.pth").write_text(line)
    bare = _bytes_in(packages)
    install(python, requirements, time_limit_s=time_limit_s)
    seconds = time.perf_counter() - started
    environment = Environment(
        directory=str(directory),
        seconds=round(seconds, 1),
        megabytes=round((_bytes_in(packages) - bare) / MEGABYTE, 1),
        versions=_versions(python),
        complaints=_complaints(python),
    )
    write_text_atomically(record, json.dumps(asdict(environment), indent=2) + "\n")
    return environment


def install(python: Path, requirements: tuple[str, ...], *, time_limit_s: float) -> None:
    """Install from the registry that pip is set up for here.

    The torch of this environment is preferred, so that both sides of a comparison compute alike;
    a library that forbids it gets the one that it wants.

    Raises
    ------
    InstallError
    """
    # Without the local part, +cpu or +cu130, which not every registry has.
    torch = f"torch=={Version(importlib.metadata.version('torch')).public}"
    deadline = time.monotonic() + time_limit_s
    result = _pip_install(python, [*requirements, torch], deadline)
    if result.returncode != 0 and "ResolutionImpossible" in result.stderr:
        result = _pip_install(python, requirements, deadline)
    _check(result)


def reinstall(python: Path, wheel: Path, *, time_limit_s: float) -> None:
    """Put another build of a package in place of the one that is there.

    Raises
    ------
    InstallError
    """
    options = ("--force-reinstall", "--no-deps", str(wheel))
    _check(_pip_install(python, options, time.monotonic() + time_limit_s))


def _check(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise InstallError((lines or result.stderr.splitlines() or ["pip failed"])[-1])


def _pip_install(
    python: Path, wanted: Iterable[str], deadline: float
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", *wanted]
    limit = max(1.0, deadline - time.monotonic())
    try:
        return subprocess.run(
            command, env=clean_environ(), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InstallError("the time limit of the installation was reached") from error


def clean_environ() -> dict[str, str]:
    """This process's variables, less what would lead another interpreter to packages of here."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _ask(python: Path, code: str) -> str:
    command = [str(python), "-I", "-c", code]
    result = subprocess.run(
        command, env=clean_environ(), capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def _versions(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json\n"
        f"wanted = {RECORDED!r}\n"
        "found = {}\n"
        "for name in wanted:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    return {"python": sys.version.split()[0], **json.loads(_ask(python, code))}


def _complaints(python: Path) -> list[str]:
    command = [str(python), "-I", "-m", "pip", "check"]
    result = subprocess.run(
        command, env=clean_environ(), capture_output=True, text=True, check=False
    )
    return [] if result.returncode == 0 else result.stdout.splitlines()


def _bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
