"""Sizes that keep the package readable: folders, files, functions, imports, docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import ModuleType

from conftest import ROOT

import tscompress

PACKAGE = ROOT / "tscompress"
MODULES = sorted(PACKAGE.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> Iterator[Function]:
    """Every function and method of a module, nested ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def body_lines(function: Function) -> int:
    """Lines of the body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1 if body else 0


def test_package_shows_at_most_20_folders_and_10_files() -> None:
    shown = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sum(path.is_dir() for path in shown) <= 20
    assert sum(path.is_file() for path in shown) <= 10


def test_modules_and_functions_are_short() -> None:
    assert not [path for path in MODULES if len(path.read_text().splitlines()) > 550]
    assert not [
        f"{path.relative_to(PACKAGE)}:{function.name}"
        for path in MODULES
        for function in functions_of(path)
        if body_lines(function) > 60
    ]


def test_median_function_is_short() -> None:
    lengths = [
        function.end_lineno - function.lineno + 1
        for path in MODULES
        for function in functions_of(path)
        if function.end_lineno is not None
    ]
    assert median(lengths) <= 10


def imports_package(node: ast.AST) -> bool:
    """Whether a node imports ``tscompress`` or something of it."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == "tscompress" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or str(node.module).split(".")[0] == "tscompress"
    return False


def test_only_commands_import_the_package_late() -> None:
    """Commands do so to start quickly; elsewhere an import in a function would hide a circle."""
    late = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        if path.parent.name != "cli" and path.name != "__main__.py"
        for function in functions_of(path)
        for node in ast.walk(function)
        if isinstance(node, ast.stmt) and imports_package(node)
    ]
    assert not late


def public_of(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public functions and classes that a module defines, and methods and properties of these."""
    for name, member in vars(module).items():
        if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(member) or inspect.isclass(member):
            yield name, member
        if inspect.isclass(member):
            for attribute, found in vars(member).items():
                method = found.fget if isinstance(found, property) else found
                own = getattr(method, "__qualname__", "") == f"{member.__qualname__}.{attribute}"
                if own and not attribute.startswith("_"):
                    yield f"{name}.{attribute}", getattr(member, attribute)


def test_everything_public_has_a_docstring() -> None:
    """A method may inherit that of the method it overrides."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(tscompress.__path__, "tscompress.")
        if not found.name.endswith("__main__")
    ]
    missing = [
        f"{module.__name__}.{name}"
        for module in modules
        for name, member in public_of(module)
        if not (member.__doc__ if inspect.isclass(member) else inspect.getdoc(member))
    ]
    missing += [module.__name__ for module in modules if not module.__doc__]
    assert missing == ["tscompress._version"]
