"""Numbers and names as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence


def interval_text(low: float | None, high: float | None, digits: int) -> str:
    """``(0.998–1.005)``; empty where the interval is not known."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"({low:.{digits}f}–{high:.{digits}f})"


def ratio_text(ratio: float, low: float | None, high: float | None, digits: int) -> str:
    """``1.002 (0.998–1.005)``, or the ratio alone where the interval is not known."""
    return f"{ratio:.{digits}f} {interval_text(low, high, digits)}".rstrip()


def plain(text: str) -> str:
    """Text of others for Markdown: nothing in it is markup, a link or a new cell.

    An underscore within a word is none.
    """
    marks = r"([\\`*\[\]<>|&]|(?<![^\W_])_|_(?![^\W_]))"
    return re.sub(marks, r"\\\1", " ".join(text.split()))


def counted(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``; a noun such as series stays as it is."""
    plural = noun if count == 1 or noun.endswith("s") else f"{noun}s"
    return f"{count:,} {plural}"


def numbered(name: str, taken: Iterable[str]) -> str:
    """``name``, with a number where it is taken: ``small (2)``."""
    others = set(taken)
    label, again = name, 1
    while label in others:
        again += 1
        label = f"{name} ({again})"
    return label


def listed(names: Sequence[str], most: int = 3) -> str:
    """``a, b and c``; of more than ``most`` the others by number."""
    shown, more = list(names[:most]), len(names) - most
    if more > 0:
        shown.append(f"{more} more")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def percent(share: float, digits: int | None = None) -> str:
    """``36%``: a share as people read it, here and in what they write (``wql=1%``).

    Parameters
    ----------
    digits
        Behind the point, zeros included; by default as many as a share that somebody chose has,
        such as ``0.5%`` or ``97.5%``.
    """
    value = 100 * share
    if digits is None:
        return f"{value:g}%"
    return f"{round(value, digits) + 0.0:.{digits}f}%"  # no -0%


def rounded_count(count: int) -> str:
    """``950``, ``73.4k``, ``8.65M``, ``1.20B``: three digits."""
    rounded = float(f"{count:.3g}")  # it may be as large as the next unit
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if rounded >= size:
            digits = 2 if rounded < 10 * size else 1 if rounded < 100 * size else 0
            return f"{count / size:.{digits}f}{unit}"
    return str(count)
