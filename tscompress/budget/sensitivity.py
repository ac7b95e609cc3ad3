"""Sensitivity of the forecast loss to each part of a model: the result, and its file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tscompress.errors import PlanError
from tscompress.io.files import write_text_atomically
from tscompress.io.strict import Strict
from tscompress.plan.plan import read_json, validated

SENSITIVITY_VERSION: Literal[1] = 1
PartKind = Literal["qk", "vo", "hidden", "embedding", "layer", "width"]
#: The part whose size is ``d_model``.
STREAM = "stream"


class Part(Strict):
    """One part that can be made smaller, and its measured losses.

    Attributes
    ----------
    name
        Attention block, feed-forward or patch embedding; of kind ``layer``: ``encoder.block.3``;
        of kind ``width``: ``stream``; of kind ``embedding``: ``shared``.
    size
        Of the original: head size, hidden units or ``d_model``, also of an embedding, whose sizes
        are ranks; 1 for a layer.
    sizes
        Measured sizes, descending, below ``size``; of a layer ``(0,)``.
    losses
        Forecast loss of the model with only this part at that size, minus the original's. Without
        a layer, the feed-forward before it is fitted; at a smaller width, or rank of an embedding,
        nothing is fitted. Raw: noise may make it slightly negative.
    """

    name: str
    kind: PartKind
    size: int = Field(ge=1)
    sizes: tuple[int, ...]
    losses: tuple[float, ...]

    @model_validator(mode="after")
    def _is_measured(self) -> Part:
        if len(self.sizes) != len(self.losses):
            raise ValueError(
                f"{self.name} has {len(self.sizes)} sizes and {len(self.losses)} losses"
            )
        smallest = 0 if self.kind == "layer" else 1
        descends = all(a > b for a, b in itertools.pairwise((self.size, *self.sizes)))
        if not descends or min(self.sizes, default=smallest) < smallest:
            raise ValueError(f"sizes of {self.name} must descend from below {self.size}")
        if not all(map(math.isfinite, self.losses)):
            raise ValueError(f"{self.name} has losses that are not finite")
        return self

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """``losses`` made monotone and non-negative: smaller sizes never cost less."""
        return tuple(max(0.0, value) for value in rising(self.losses))


class Sensitivity(Strict):
    """The parts of a model, measured.

    Attributes
    ----------
    base_loss
        Forecast loss of the model as it is on the same windows; of Chronos-2 and Chronos-T5 at the
        forecasts of the original, whose spread it is where nothing was cut.
    settings
        How it was measured, for the record.
    """

    version: Literal[1] = SENSITIVITY_VERSION
    family: str
    base_loss: float
    parts: tuple[Part, ...]
    settings: dict[str, Any] = Field(default_factory=dict)

    def __repr__(self) -> str:
        measured = [(loss, part) for part in self.parts for loss in part.losses[-1:]]
        facts = [self.family, f"loss {self.base_loss:.4g}", f"{len(self.parts)} parts"]
        if measured:
            loss, part = max(measured, key=lambda pair: pair[0])
            facts.append(f"most {loss:+.3g} with {part.kind} of {part.name} at {part.sizes[-1]}")
        return f"Sensitivity({', '.join(facts)})"

    def __str__(self) -> str:
        return repr(self)

    def cost(self, name: str, kind: PartKind, size: int) -> float:
        """Predicted rise of the loss with this part alone at ``size``, at least 0.

        Measured losses are made monotone and interpolated linearly in log(size); at the full size
        the cost is 0.

        Raises
        ------
        PlanError
            That part was not measured, or ``size`` is outside the measured sizes.
        """
        matching = (part for part in self.parts if part.name == name and part.kind == kind)
        part = next(matching, None)
        if part is None:
            raise PlanError(f"the sensitivity holds no {kind} of {name!r}.")
        sizes, costs = (part.size, *part.sizes), (0.0, *part.costs)
        if not sizes[-1] <= size <= sizes[0]:
            raise PlanError(
                f"{kind} of {name} was measured at sizes {sizes[0]} to {sizes[-1]}, not {size}."
            )
        at = next(i for i, known in enumerate(sizes) if known <= size)
        if sizes[at] == size:
            return costs[at]
        larger, smaller = math.log(sizes[at - 1]), math.log(sizes[at])
        share = (larger - math.log(size)) / (larger - smaller)
        return costs[at - 1] + share * (costs[at] - costs[at - 1])

    def of_width(self, width: int) -> Sensitivity:
        """For a narrower residual stream: ranks of an embedding are below ``width``."""

        def part_of(part: Part) -> Part:
            if part.kind != "embedding" or part.size <= width:
                return part
            pairs = zip(part.sizes, part.losses, strict=True)
            below = [pair for pair in pairs if pair[0] < width]
            return Part(
                name=part.name,
                kind=part.kind,
                size=width,
                sizes=tuple(size for size, _ in below),
                losses=tuple(loss for _, loss in below),
            )

        return self.model_copy(update={"parts": tuple(map(part_of, self.parts))})

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing the file in one step."""
        write_text_atomically(Path(path), self.to_json())

    def to_json(self) -> str:
        """What :meth:`save` writes."""
        return self.model_dump_json(indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read a sensitivity file.

        Raises
        ------
        PlanError
            The file is missing, is not JSON, or is not a sensitivity; the message names the first
            offending key.
        """
        content = read_json(path, "sensitivity")
        return validated(cls, content, source=repr(str(path)), kind="sensitivity")


def rising(values: Sequence[float]) -> list[float]:
    """Nearest non-decreasing sequence in least squares, by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean = (before * count + mean * length) / (count + length)
            length += count
        pools.append((mean, length))
    return [mean for mean, length in pools for _ in range(length)]
