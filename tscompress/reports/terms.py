"""Short names of metrics, spelled out where a text first uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tscompress.evaluation.results import METRIC_NAMES

#: The meaning of each metric, for a page that shows it.
MEANINGS = (
    "The WQL scores the whole forecast, by nine quantiles; large series count most.",
    "The MASE scores its median, in units of each series' seasonal change; all count alike.",
)


def spelled_out(texts: Sequence[str]) -> list[str]:
    """The texts, in the order of a page, with each metric spelled out where it comes first."""
    told: set[str] = set()

    def spell(match: re.Match[str]) -> str:
        name = match[0]
        if name in told:
            return name
        told.add(name)
        spelled = f"{METRIC_NAMES[name]} ({name})"
        return spelled if match.start() else spelled[0].upper() + spelled[1:]

    pattern = re.compile(rf"\b({'|'.join(METRIC_NAMES)})\b")
    return [pattern.sub(spell, text) for text in texts]
