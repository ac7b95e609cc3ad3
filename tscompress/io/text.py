"""Numbers as people read them."""

from __future__ import annotations

import math


def interval_text(low: float | None, high: float | None, digits: int) -> str:
    """``(0.998–1.005)``; empty where the interval is not known."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"({low:.{digits}f}–{high:.{digits}f})"


def ratio_text(ratio: float, low: float | None, high: float | None, digits: int) -> str:
    """``1.002 (0.998–1.005)``, or the ratio alone where the interval is not known."""
    return f"{ratio:.{digits}f} {interval_text(low, high, digits)}".rstrip()
