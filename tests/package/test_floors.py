"""What keeps the package readable: sizes, imports, families, docstrings.

Every check is a function of a tree. It holds for the package, and fails for a made-up tree.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

import pytest
from shared_fixtures import ROOT

import tscompress
from tscompress.families.registry import FAMILIES

PACKAGE = ROOT / "tscompress"
MOST_FOLDERS, MOST_FILES, MOST_LINES, MOST_BODY_LINES, MEDIAN_LINES = 20, 10, 550, 60, 10
Function = ast.FunctionDef | ast.AsyncFunctionDef


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def functions_of(root: Path) -> Iterator[tuple[Path, Function]]:
    """Every function and method of a tree, nested ones included, with its module."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Function):
                yield path.relative_to(root), node


# --------------------------------------------------------------------------------------------------
# Folders and files
# --------------------------------------------------------------------------------------------------


def crowd(root: Path) -> list[str]:
    """Kinds of entries of which a folder shows too many."""
    shown = [path for path in root.iterdir() if path.name != "__pycache__"]
    counts = {
        "folders": (sum(path.is_dir() for path in shown), MOST_FOLDERS),
        "files": (sum(path.is_file() for path in shown), MOST_FILES),
    }
    return [name for name, (count, most) in counts.items() if count > most]


def test_package_shows_at_most_20_folders_and_10_files() -> None:
    assert crowd(PACKAGE) == []


@pytest.mark.parametrize(("kind", "most"), [("folders", 20), ("files", 10)])
def test_one_entry_more_is_found(tmp_path: Path, kind: str, most: int) -> None:
    (tmp_path / "__pycache__").mkdir()
    for number in range(most + 1):
        assert crowd(tmp_path) == []
        write(tmp_path, f"{number}/a.py" if kind == "folders" else f"{number}.py", "")
    assert crowd(tmp_path) == [kind]


# --------------------------------------------------------------------------------------------------
# Lengths
# --------------------------------------------------------------------------------------------------


def long_modules(root: Path) -> list[str]:
    """Modules of too many lines."""
    paths = sorted(root.rglob("*.py"))
    return [p.name for p in paths if len(p.read_text().splitlines()) > MOST_LINES]


def body_lines(function: Function) -> int:
    """Lines of the body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1 if body else 0


def long_functions(root: Path) -> list[str]:
    """Functions with a body of too many lines, as ``module:function``."""
    found = functions_of(root)
    return [f"{path}:{f.name}" for path, f in found if body_lines(f) > MOST_BODY_LINES]


def median_length(root: Path) -> float:
    """Lines of the median function, with its signature and docstring."""
    lengths = [
        function.end_lineno - function.lineno + 1
        for _, function in functions_of(root)
        if function.end_lineno is not None
    ]
    return median(lengths)


def test_modules_and_functions_are_short() -> None:
    assert long_modules(PACKAGE) == []
    assert long_functions(PACKAGE) == []
    assert median_length(PACKAGE) <= MEDIAN_LINES


def test_one_line_more_is_found(tmp_path: Path) -> None:
    write(tmp_path, "folder/a.py", "pass\n" * MOST_LINES)
    assert long_modules(tmp_path) == []
    write(tmp_path, "folder/a.py", "pass\n" * (MOST_LINES + 1))
    assert long_modules(tmp_path) == ["a.py"]


@pytest.mark.parametrize("head", ["def f():", "async def f():", "class A:\n def f(self):"])
def test_one_line_more_of_a_body_is_found(tmp_path: Path, head: str) -> None:
    documented = f'{head}\n  """Does not\n\n  count."""\n'
    for start in (f"{head}\n", documented):
        write(tmp_path, "folder/a.py", start + "  pass\n" * MOST_BODY_LINES)
        assert long_functions(tmp_path) == []
        write(tmp_path, "folder/a.py", start + "  pass\n" * (MOST_BODY_LINES + 1))
        assert long_functions(tmp_path) == ["folder/a.py:f"]


def test_a_nested_function_is_found(tmp_path: Path) -> None:
    nested = "  def g():\n" + "   pass\n" * (MOST_BODY_LINES + 1)
    write(tmp_path, "a.py", f"def f():\n{nested}")
    assert long_functions(tmp_path) == ["a.py:f", "a.py:g"]


def test_the_median_is_that_of_functions(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "def f():\n  pass\n" + "def g():\n" + "  pass\n" * 20)
    assert median_length(tmp_path) == (2 + 21) / 2
    write(tmp_path, "b.py", "def h():\n" + "  pass\n" * 10)
    assert median_length(tmp_path) == 11 > MEDIAN_LINES


# --------------------------------------------------------------------------------------------------
# Imports
# --------------------------------------------------------------------------------------------------


def imports_package(node: ast.AST) -> bool:
    """Whether a node imports ``tscompress`` or something of it."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "tscompress" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or str(node.module).split(".")[0] == "tscompress"
    return False


def late_imports(root: Path) -> list[str]:
    """Imports of the package in functions, but for those of commands, as ``module:line``."""
    return [
        f"{path}:{node.lineno}"
        for path, function in functions_of(root)
        if path.parts[0] not in ("cli", "__main__.py")
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and imports_package(node)
    ]


def test_only_commands_import_the_package_late() -> None:
    """Commands do so to start quickly; elsewhere an import in a function would hide a circle."""
    assert late_imports(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        "import tscompress",
        "import os, tscompress.io.files as files",
        "from tscompress import api",
        "from tscompress.io import files",
        "from . import files",
        "from ..io.files import user_path",
    ],
)
def test_a_late_import_is_found(tmp_path: Path, line: str) -> None:
    late = f"def f():\n  if True:\n    {line}\n"
    for name in ("io/a.py", "io/cli/a.py", "cli.py"):
        write(tmp_path, name, late)
        assert late_imports(tmp_path) == [f"{name}:3"]
        (tmp_path / name).unlink()
    write(tmp_path, "io/a.py", f"{line}\ndef f():\n  import os\n  import tscompressed\n")
    write(tmp_path, "cli/a.py", late)
    write(tmp_path, "__main__.py", late)
    assert late_imports(tmp_path) == []


# --------------------------------------------------------------------------------------------------
# Families
# --------------------------------------------------------------------------------------------------

#: What a recipe may name, and the forecasters without torch, which cannot import the adapters.
NAMES_FAMILIES = {"training/pretrain_recipe.py", "runtime/load.py"}


def modules_that_name_families(root: Path) -> set[str]:
    """Modules outside ``families/`` with the name of a family as a value."""
    return {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] != "families"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in FAMILIES
    }


def test_families_alone_ask_which_family_a_model_is_of() -> None:
    assert modules_that_name_families(PACKAGE) == NAMES_FAMILIES


def test_a_module_that_names_a_family_is_found(tmp_path: Path) -> None:
    for name in ("families/a.py", "plan/a.py"):
        write(tmp_path, name, "def f(model):\n  return model.family == 'chronos-2'\n")
    write(tmp_path, "io/a.py", "'chronos-2 in a sentence'\n")
    assert modules_that_name_families(tmp_path) == {"plan/a.py"}


# --------------------------------------------------------------------------------------------------
# Docstrings
# --------------------------------------------------------------------------------------------------


def undocumented(module: ModuleType) -> list[str]:
    """What is public in a module and has no docstring, itself included.

    Looked at is the source: dataclasses and named tuples make themselves one. A method may inherit
    that of the method it overrides.
    """
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    missing = [] if ast.get_docstring(tree) else [module.__name__]
    for node in tree.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{module.__name__}.{node.name}"
        if not ast.get_docstring(node):
            missing.append(name)
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(method, Function) and not method.name.startswith("_"):
                found = getattr(getattr(module, node.name), method.name)
                if not (ast.get_docstring(method) or inspect.getdoc(found)):
                    missing.append(f"{name}.{method.name}")
    return missing


def undocumented_below(package: ModuleType) -> list[str]:
    """The same of a package with all its modules, but for entry points."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    names = [one.name for one in found if not one.name.endswith("__main__")]
    modules = [package, *map(importlib.import_module, names)]
    return [name for module in modules for name in undocumented(module)]


def test_everything_public_has_a_docstring() -> None:
    assert undocumented_below(tscompress) == ["tscompress._version"]


DOCUMENTED = '''"""Things."""
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

class Base:
    """A base."""
    def inherits(self):
        """A method."""
    def _hidden(self): pass
class A(Base):
    """A class."""
    def __init__(self): pass
    def inherits(self): pass
def _hidden(): pass
class _Hidden:
    def shown(self): pass
'''

UNDOCUMENTED = {
    "function": "def f(): pass",
    "coroutine": "async def f(): pass",
    "cached": "@lru_cache\ndef f(): pass",
    "class": "class f: pass",
    "dataclass": "@dataclass\nclass f:\n  x: int",
    "named tuple": "class f(NamedTuple):\n  x: int",
    "subclass": "class f(Base): pass",
    "method": "class B(Base):\n  'B.'\n  def f(self): pass",
    "property": "class B:\n  'B.'\n  @property\n  def f(self): pass",
    "cached property": "class B:\n  'B.'\n  @cached_property\n  def f(self): pass",
    "class method": "class B:\n  'B.'\n  @classmethod\n  def f(cls): pass",
    "static method": "class B:\n  'B.'\n  @staticmethod\n  def f(): pass",
}


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with docstrings, to be imported as ``made_up``."""
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "made_up/__init__.py", DOCUMENTED)
    write(tmp_path, "made_up/__main__.py", "raise SystemExit(1)")
    write(tmp_path, "made_up/folder/__init__.py", DOCUMENTED)
    write(tmp_path, "made_up/folder/a.py", DOCUMENTED)
    yield tmp_path / "made_up"
    for name in [name for name in sys.modules if name.split(".")[0] == "made_up"]:
        del sys.modules[name]


def test_private_and_inherited_names_need_no_docstring(made_up: Path) -> None:
    assert undocumented_below(importlib.import_module("made_up")) == []


@pytest.mark.parametrize("kind", UNDOCUMENTED)
def test_a_missing_docstring_is_found(made_up: Path, kind: str) -> None:
    write(made_up, "folder/a.py", f"{DOCUMENTED}{UNDOCUMENTED[kind]}\n")
    (missing,) = undocumented_below(importlib.import_module("made_up"))
    assert missing in ("made_up.folder.a.f", "made_up.folder.a.B.f")


@pytest.mark.parametrize("name", ["__init__", "folder/__init__", "folder/a"])
def test_a_module_without_a_docstring_is_found(made_up: Path, name: str) -> None:
    write(made_up, f"{name}.py", DOCUMENTED.split("\n", 1)[1])
    whole = f"made_up/{name}".replace("/", ".").removesuffix(".__init__")
    assert undocumented_below(importlib.import_module("made_up")) == [whole]
