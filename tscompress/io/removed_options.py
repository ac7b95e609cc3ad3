"""Options that were removed: files written before still load where they hold the default of then.

It is what is done now, but for `continuations`, whose default lost and left with it.

A commit keeps the code of each, so that its measurement can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The last commit that has the options named here.
ABLATIONS = "commit 27dc031"


def without_removed(values: Any, removed: Mapping[str, tuple[Any, ...]]) -> Any:
    """``values`` of a config without its ``removed`` keys, each with the values it may have had.

    Raises
    ------
    ValueError
        A removed key has another value.
    """
    if not isinstance(values, Mapping):
        return values
    for name, allowed in removed.items():
        if name in values and values[name] not in allowed:
            raise ValueError(
                f"{name} was removed, for it never paid; leave it out ({ABLATIONS} has it)"
            )
    return {name: value for name, value in values.items() if name not in removed}
