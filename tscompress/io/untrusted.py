"""Reading files that someone else wrote: bounded in size and depth, regular files, never code.

Whatever is wrong with one raises :class:`UnreadableFileError`, whose message is one line; who
asked for the file adds what was expected.
"""

from __future__ import annotations

import errno
import itertools
import json
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from safetensors import SafetensorError, safe_open

#: Plans of the largest models have less than 1 MB, their safetensors headers less than 200 kB.
MAX_JSON_BYTES = 16 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
MAX_YAML_BYTES = 2**20
MAX_YAML_DEPTH = 32
MAX_REASON = 300  # characters of a message that others wrote

#: libyaml's, where PyYAML has it: recipes are read several times as fast.
_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _DistinctKeysLoader(_SAFE_LOADER):  # type: ignore[misc]
    """Refuses a key that comes twice in a mapping, of which PyYAML keeps the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise UnreadableFileError(f"it has the key {shown(key.value)} twice")
                keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


_FLOATING = ("F64", "F32", "BF16", "F16")
_WHOLE = ("I64", "I32", "I16", "I8", "U8", "BOOL")


class UnreadableFileError(ValueError):
    """A file with other content than expected. The message is one line."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in the header of a safetensors file; ``dtype`` in its own names."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point values."""
        return self.dtype in _FLOATING


def single_line(error: object, limit: int = MAX_REASON) -> str:
    """A message of other software as one printable line, cut to ``limit`` characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    return (text if len(text) <= limit else text[: limit - 1] + "…").rstrip(".")


def shown(value: object) -> str:
    """``repr`` in a few words, of whatever a file holds."""
    try:
        return single_line(reprlib.repr(value))
    except ValueError:  # Python writes no integers of more than 4300 digits
        return "a number of thousands of digits"


def first_problem(error: ValidationError, content: Any = None) -> tuple[str, str, dict[str, Any]]:
    """Dotted key, message and details of the first thing that pydantic found, as single lines.

    Names that pydantic puts between the keys of ``content``, those of the members of a union, are
    left out.
    """
    first: Any = error.errors(include_url=False)[0]
    if not first["loc"]:
        return "", _reason(first), first
    *path, last = first["loc"]
    parts = []
    for part, following in zip(path, [*path, last][1:], strict=True):
        if isinstance(content, Mapping):
            below = content.get(part)
            if isinstance(below, Mapping | list | tuple):
                content = below
            elif part in content and following not in content:
                last = part  # what follows are the kinds that its value could have been of
                break
            else:
                continue
        elif isinstance(content, list | tuple) and isinstance(part, int):
            content = content[part]
        parts.append(part)
    where = ".".join(single_line(part, 60) for part in (*parts, last))
    return where, _reason(first), first


def _reason(first: dict[str, Any]) -> str:
    return single_line(first["msg"].removeprefix("Value error, "))


def key_problem(where: str, first: dict[str, Any], model: type[BaseModel]) -> str | None:
    """What is wrong with a key rather than its value, of what :func:`first_problem` found."""
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(_allowed_keys(model, first["loc"])) or "see the docs"
        return f"unknown key {where!r}; allowed here: {allowed}"
    return f"{where}: missing; add it" if first["type"] == "missing" else None


def _allowed_keys(model: type[BaseModel], keys: Sequence[Any]) -> list[str]:
    """Keys allowed beside the last of ``keys``, pydantic's way to a value; none if unclear."""
    found = {model}
    for part in keys[:-1]:
        if isinstance(part, int):  # of a list, whose elements have been looked at
            continue
        fields = [one.model_fields[part] for one in found if part in one.model_fields]
        # A part that is no field is the tag of a union's member.
        found = (
            {one for field in fields for one in _models_in(field.annotation)}
            if fields
            else {one for one in found if any(part in get_args(f.annotation) for f in _fields(one))}
        )
    return list(next(iter(found)).model_fields) if len(found) == 1 else []


def _fields(model: type[BaseModel]) -> Iterable[FieldInfo]:
    return model.model_fields.values()


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def regular_file(path: Path, limit: int | None = None) -> int:
    """Size of a file of at most ``limit`` bytes: neither a pipe, which would hang, nor a device.

    Raises
    ------
    FileNotFoundError, PermissionError
    UnreadableFileError
    """
    try:
        found = path.stat()
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, ValueError) as error:  # a loop of links, a NUL in the name
        raise UnreadableFileError(single_line(error)) from None
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableFileError("it is not a regular file")
    if limit is not None and found.st_size > limit:
        raise UnreadableFileError(f"it has {found.st_size:,} bytes; at most {limit:,} are read")
    return found.st_size


def read_text(path: Path, limit: int) -> str:
    """UTF-8 text of a regular file; raises as :func:`regular_file`."""
    regular_file(path, limit)
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableFileError(single_line(error)) from None


def read_json(path: Path) -> Any:
    """Content of a JSON file.

    Raises
    ------
    FileNotFoundError, PermissionError
    UnreadableFileError
        It is not a regular file, too large, not UTF-8, not JSON, or nested too deeply.
    """
    try:
        return json.loads(read_text(path, MAX_JSON_BYTES))
    except RecursionError:
        raise UnreadableFileError("it is nested too deeply") from None
    except UnreadableFileError:
        raise
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise UnreadableFileError(single_line(error)) from None


def read_yaml(path: Path) -> Any:
    """Content of a YAML file of plain data.

    Aliases are refused: those of aliases make a few lines stand for gigabytes.

    Raises
    ------
    FileNotFoundError, PermissionError
    UnreadableFileError
        As :func:`read_json`; or it has aliases, a key twice, or tags that are not plain data.
    """
    text = read_text(path, MAX_YAML_BYTES)
    try:
        _check_events(text)
        return yaml.load(text, Loader=_DistinctKeysLoader)  # plain data only, as safe_load
    except UnreadableFileError:
        raise
    # Constructors of dates and numbers do not wrap what they raise; a bad !!bool is a KeyError.
    except (
        yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError,
        IndexError, RecursionError,
    ) as error:  # fmt: skip
        raise UnreadableFileError(single_line(error)) from None


def _check_events(text: str) -> None:
    """Refuse aliases and deep nesting while scanning, before anything is built."""
    depth = 0
    for event in yaml.parse(text, Loader=_SAFE_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise UnreadableFileError("it has YAML aliases (*name); write the values out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_YAML_DEPTH:
            raise UnreadableFileError(f"it is nested more than {MAX_YAML_DEPTH} deep")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors that a safetensors file declares, checked against its size; no weights are read.

    Raises
    ------
    FileNotFoundError, PermissionError
    UnreadableFileError
        It is truncated, its header lies about offsets, shapes or dtypes, or is too long.
    """
    size = regular_file(path)
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise UnreadableFileError(f"a header of {length:,} bytes in a file of {size:,}")
        if length > MAX_HEADER_BYTES:
            raise UnreadableFileError(
                f"a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read"
            )
        # safetensors itself holds offsets against shapes, one another and the end of the file.
        with safe_open(path, framework="pt") as reader:
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            found = {
                name: StoredTensor(str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except PermissionError:
        raise
    except (SafetensorError, OSError, OverflowError) as error:
        raise UnreadableFileError(single_line(error)) from None
    for name, tensor in found.items():
        if tensor.dtype not in (*_FLOATING, *_WHOLE):
            raise UnreadableFileError(
                f"{shown(name)} has dtype {tensor.dtype}; "
                f"read are {', '.join((*_FLOATING, *_WHOLE))}"
            )
    return found


def is_loop(path: Path) -> bool:
    """Whether a link leads, perhaps through others, to itself."""
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def leads_outside(path: Path) -> bool:
    """Whether a file of a checkpoint is a link to somewhere else.

    The Hub's cache is a directory of links: ``snapshots/<commit>/`` to ``blobs/`` beside it.
    """
    if is_loop(path):  # of that, resolve() depends on Python's version
        return True
    directory, target = path.parent.resolve(), path.resolve()
    homes = [directory]
    for above in itertools.islice(directory.parents, 3):
        if above.name == "snapshots":
            homes.append(above.parent / "blobs")
    return not any(target.is_relative_to(home) for home in homes)
