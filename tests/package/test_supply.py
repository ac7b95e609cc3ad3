"""What is handed out, wheel and source archive, file by file and byte by byte; what it asks for."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from shared_fixtures import ROOT

import tscompress

PACKAGE = ROOT / "tscompress"
#: 2024-01-01; what a release takes from the time of its commit.
EPOCH = 1704067200
NOT_SHIPPED = ("__pycache__", ".git", ".venv", "dist", ".*_cache", ".hypothesis")


def build(root: Path, output: Path, *targets: str, epoch: int = EPOCH) -> tuple[Path, ...]:
    """Wheel and source archive, or what is asked for, made by the backend of pyproject.toml."""
    command = [sys.executable, "-m", "hatchling", "build"]
    for target in targets or ("wheel", "sdist"):
        command += ["-t", target]
    done = subprocess.run(
        [*command, "-d", str(output)], cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (*output.glob("*.whl"), *output.glob("*.tar.gz"))


def copy_of_the_tree(target: Path, *, time: int, mode: int) -> Path:
    """The tree elsewhere, with other times and permissions; weights and results are empty."""

    def copied(source: str, copy: str) -> None:
        if Path(source).suffix in (".safetensors", ".csv", ".png"):
            Path(copy).touch()
        else:
            shutil.copyfile(source, copy)

    def left_out(folder: str, names: list[str]) -> set[str]:
        found = shutil.ignore_patterns(*NOT_SHIPPED)(folder, names)
        return found | {"results"} if Path(folder) == ROOT else found

    shutil.copytree(ROOT, target, ignore=left_out, copy_function=copied)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_file():
            path.chmod(mode)
        os.utime(path, (time, time))
    return target


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is built from: packing the true weights takes long, and `make wheel` does it."""
    target = tmp_path_factory.mktemp("tree") / "first"
    copy_of_the_tree(target, time=1_500_000_000, mode=0o644)
    leftovers = "tscompress/__pycache__/a.pyc", "tests/.ruff_cache/a", "dist/a.whl", "results/a"
    for name in leftovers:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).touch()
    return target


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    return build(tree, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, ...]) -> zipfile.ZipFile:
    return zipfile.ZipFile(built[0])


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Any:
    return message_from_string(wheel.read(f"{info(wheel)}METADATA").decode())


def info(wheel: zipfile.ZipFile) -> str:
    return f"tscompress-{tscompress.__version__}.dist-info/"


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return content


# --------------------------------------------------------------------------------------------------
# What is inside
# --------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_its_data_alone(wheel: zipfile.ZipFile) -> None:
    model_cards = set(PACKAGE.glob("checkpoints/reference/*/README.md"))
    ours = {
        f"tscompress/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if path.name != "README.md" or path in model_cards
    }
    assert len(model_cards) == 5
    about = {
        info(wheel) + name
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert set(wheel.namelist()) == ours | about
    assert {Path(name).suffix for name in ours} <= {
        ".py", ".typed", ".md", ".json", ".safetensors", ".css", ".j2", ".js", ".yaml",
    }  # fmt: skip


def test_runtime_data_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for reference in ("bolt", "bolt-nano", "chronos2", "t5", "t5-nano"):
        home = f"tscompress/checkpoints/reference/{reference}"
        assert {f"{home}/{n}" for n in ("config.json", "model.safetensors", "README.md")} <= names
    suites = {f"tscompress/data/suite_files/{name}.yaml" for name in ("zero-shot", "in-domain")}
    templates = {"tscompress/hub/templates/card.md.j2"}
    for end in ("css", "html.j2", "js", "md.j2"):
        templates.add(f"tscompress/reports/templates/report.{end}")
    page = {"index.html.j2", "page.css", "read.js", "forecast.js", "chart.js", "page.js"}
    templates |= {f"tscompress/exporting/page/files/{name}" for name in page}
    assert suites | templates <= names
    assert wheel.read(f"{info(wheel)}entry_points.txt").decode().split() == [
        "[console_scripts]", "tscompress", "=", "tscompress.__main__:main",
    ]  # fmt: skip


def test_wheel_hashes_match_the_record(wheel: zipfile.ZipFile) -> None:
    rows = [line.split(",") for line in wheel.read(f"{info(wheel)}RECORD").decode().splitlines()]
    recorded = {name: (digest, size) for name, digest, size in rows}
    assert recorded.keys() == set(wheel.namelist())
    for name, (digest, size) in recorded.items():
        if name.endswith("RECORD"):
            continue
        content = wheel.read(name)
        found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={found}", str(len(content))), name


def test_installed_files_are_readable(wheel: zipfile.ZipFile) -> None:
    for item in wheel.infolist():
        assert stat.S_IMODE(item.external_attr >> 16) == 0o644, item.filename
    for path in (ROOT / "tscompress").rglob("*.*"):  # the wheel is built from a copy
        assert not path.is_file() or not path.stat().st_mode & 0o111, path


def test_the_source_archive_can_be_tested_and_holds_no_leftovers(built: tuple[Path, ...]) -> None:
    with tarfile.open(built[1]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    top = {name.split("/")[0] for name in names}
    folders = {"tscompress", "recipes", "eval", "tests"}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert top == folders | files
    for name in names:
        assert not re.search(r"__pycache__|\.pyc$|\.pt$|\.bin$|\.pkl$|\.env|_cache/", name), name
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert tests <= set(names)


# --------------------------------------------------------------------------------------------------
# The same bytes
# --------------------------------------------------------------------------------------------------


def test_two_builds_are_equal_byte_for_byte(
    tree: Path, built: tuple[Path, ...], tmp_path: Path
) -> None:
    """Wherever and whenever the tree was checked out, and by whoever."""
    second = copy_of_the_tree(tmp_path / "elsewhere" / "second", time=1_700_000_000, mode=0o600)
    for ours, theirs in zip(built, build(second, tmp_path / "two"), strict=True):
        assert ours.name == theirs.name
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
    (other,) = build(tree, tmp_path / "later", "wheel", epoch=EPOCH + 86400)
    assert other.read_bytes() != (built[0].parent / other.name).read_bytes()


# --------------------------------------------------------------------------------------------------
# What it asks for
# --------------------------------------------------------------------------------------------------


def test_wheel_requirements_match_pyproject(metadata: Any) -> None:
    content = project()["project"]
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    named = {str(one) for one in asked if one.marker is None}
    assert named == {str(Requirement(line)) for line in content["dependencies"]}
    assert set(metadata.get_all("Provides-Extra")) == set(content["optional-dependencies"])
    assert metadata["Requires-Python"] == content["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_every_dependency_is_bounded_and_installed_within_its_bounds() -> None:
    content = project()
    lines = [*content["project"]["dependencies"], *content["build-system"]["requires"]]
    lines += [line for extra in content["project"]["optional-dependencies"].values()
              for line in extra if not line.startswith("tscompress")]  # fmt: skip
    for line in lines:
        requirement = Requirement(line)
        operators = {one.operator for one in requirement.specifier}
        assert operators == {">=", "<"}, line
        assert not requirement.url, line
        try:
            version = Version(importlib.metadata.version(requirement.name)).public
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        assert requirement.specifier.contains(version), f"{line}: {version} is installed"


def test_no_typer_without_the_click_of_today() -> None:
    """0.15 shows no help with click 8.2."""
    lines = project()["project"]["dependencies"]
    (typer,) = (one for one in map(Requirement, lines) if one.name == "typer")
    assert not typer.specifier.contains("0.15.4")
    assert typer.specifier.contains("0.16.0")


def test_classifiers_match_requires_python(metadata: Any) -> None:
    named = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier")
             if re.search(r":: 3\.\d+$", line)]  # fmt: skip
    allowed = SpecifierSet(metadata["Requires-Python"])
    assert named
    assert all(allowed.contains(version) for version in named)
    assert allowed.contains(f"{sys.version_info[0]}.{sys.version_info[1]}")
