"""Results of measurements as JSON: written for people, read back and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from tscompress.errors import DataError
from tscompress.io.strict import Strict
from tscompress.io.untrusted import UnreadableFileError, first_problem, regular_file

R = TypeVar("R", bound="Result")


class Result(Strict):
    """A result that a file can hold, alone or with the one that it was compared with.

    Attributes
    ----------
    kind
        What it is, with an article, for messages.
    command
        Of the shell, which writes such files.
    limit
        Largest file that is read, in bytes; None: any.
    """

    kind: ClassVar[str]
    command: ClassVar[str]
    limit: ClassVar[int | None] = None

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Read plain data, as ``to_dict`` wrote it.

        Raises
        ------
        DataError
            A key is missing, unknown or of the wrong type.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            where, reason, _ = first_problem(error)
            where = f"{where}: " if where else ""
            raise DataError(f"not {cls.kind}: {where}{reason}.") from error

    @classmethod
    def read_file(cls: type[R], path: Path) -> tuple[R, ...]:
        """The result in a file and, where the file has one, that of the original.

        Raises
        ------
        DataError
            There is no such file, or it holds something else.
        """
        try:
            regular_file(path, cls.limit)  # a pipe would hang
            content = json.loads(path.read_bytes())  # PowerShell redirects as UTF-16
        except (OSError, UnreadableFileError, ValueError, RecursionError) as error:
            noun = cls.kind.split(maxsplit=1)[1]
            raise DataError(
                f"{str(path)!r} holds no {noun} ({path.name}: {_reason(error)}); give what "
                f"`{cls.command}` wrote."
            ) from error
        if not isinstance(content, dict):
            raise DataError(f"{str(path)!r} is not {cls.kind}: it is no JSON object.")
        keys = ("result", "against")
        found = [content[key] for key in keys if content.get(key) is not None] or [content]
        try:
            return tuple(cls.from_dict(one) for one in found)
        except DataError as error:
            reason = str(error).removesuffix(".")
            raise DataError(
                f"{str(path)!r}: {reason}; give what `{cls.command}` wrote."
            ) from error.__cause__


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    return str(error) if isinstance(error, UnreadableFileError) else f"not JSON: {error}"


def results_json(content: Mapping[str, Any]) -> str:
    """JSON for people: indented, with each list of numbers on one line."""
    # Strings in JSON hold no line breaks, so that this matches lists alone.
    lists = re.compile(r"\[\n([^\[\]{}\"]*)\n\s*\]")
    text = json.dumps(content, indent=2)
    return lists.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"
