"""Options of folding besides sizes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from tscompress.checkpoints.load import LoadedModel
from tscompress.errors import UsageError
from tscompress.families.registry import adapter_of_layers
from tscompress.io.removed_options import without_removed
from tscompress.io.strict import Strict
from tscompress.plan.plan import DROPS


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bfloat16, several times faster than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


#: Rounds of fitting the values of all heads together (:func:`~tscompress.linalg.fold_values`).
VALUE_SWEEPS = 10


class FoldConfig(Strict):
    """Options of folding besides sizes. ``eval/notes/folding.md`` has measurements of most.

    Attributes
    ----------
    refit
        Target of the fit of output projections: ``none``; ``layer``, the layer's original output
        (not with a latent); ``residual``, the difference from the partly folded model's residual
        stream to the original's. With dropped layers, ``residual`` fits the sublayer before them to
        the original's stream after them; otherwise the target is the model without these layers.
        Where sizes by layer go with a width, the original of their fit is the model of that width.
    frequencies
        Kept rotary pairs: ``stock``, those in the plan, by default those of a stock config;
        ``free``, as many of those whose scores vary most, for a factored checkpoint, which keeps
        more of the skill (eval/RESULTS.md). Only Chronos-2 has such pairs.
    damping
        Of the fit of output projections, in units of the mean eigenvalue of the moment of their
        inputs (:func:`~tscompress.linalg.least_squares`); null: the family's
        (:class:`~tscompress.families.base.LayeredFamily`). ``refit: none`` has no fit to damp.
    precision
        Of feed-forwards in forward passes; null: bfloat16 where the hardware multiplies in it.
        Attention, residual streams, moments and fits are float32 or float64.
    univariate
        Of Chronos-2, but not with a budget: every series is forecast alone. Queries and keys of
        group attention are dropped, its values and outputs are one matrix where that is smaller.
        Alone it is exact and reads no series. A factored checkpoint, which refuses covariates,
        several targets in a task and ``cross_learning``.
    single_token
        Of Chronos-Bolt, but not with a budget: its decoder reads one token, so queries and keys of
        its self-attention do nothing, and its first layer has the same query for every series. They
        are dropped or have one dimension a head. Alone it is exact and reads no series. A factored
        checkpoint.
    """

    refit: Literal["residual", "layer", "none"] = "residual"
    frequencies: Literal["stock", "free"] = "stock"
    precision: Literal["float32", "bfloat16"] | None = None
    damping: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="of the fit of output projections; null: the family's",
    )
    univariate: bool = Field(
        default=False,
        description="Chronos-2: every series is forecast alone, without group attention",
    )
    single_token: bool = Field(
        default=False,
        description="Chronos-Bolt: drop what its decoder of one token does not need",
    )

    _removed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "query_moments": (True,),
        "centre_keys": (True,),
        "value_moments": ("attention",),
        "value_sweeps": (VALUE_SWEEPS,),
        "order": ("compressed",),
        "select": ("greedy",),
        "continuations": ("given", "both"),
    }

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values, cls._removed)

    @model_validator(mode="after")
    def _damps_a_fit(self) -> FoldConfig:
        # Recipes in earlier checkpoints have the family's, beside a precision.
        if self.refit == "none" and self.damping is not None and self.precision is None:
            raise ValueError(
                f"damping is {self.damping:g}, and refit: none fits nothing that it would damp; "
                "leave one out"
            )
        return self

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those of :data:`~tscompress.plan.plan.DROPS` that are set."""
        return tuple(name for name in DROPS if getattr(self, name))

    def resolved(self, loaded: LoadedModel) -> FoldConfig:
        """A copy with the family's damping and this machine's precision instead of null.

        Raises
        ------
        UsageError
            Rotary frequencies shall be chosen, and the model has none.
        """
        if self.frequencies == "free" and not any(b.rotary for b in loaded.architecture.attention):
            raise UsageError(
                f"frequencies: free chooses rotary frequencies, and a {loaded.family} has none; "
                "leave it out."
            )
        settings: dict[str, Any] = {}
        if self.damping is None and self.refit != "none":
            settings["damping"] = adapter_of_layers(loaded.family).fold_damping
        if self.precision is None:
            native = multiplies_bfloat16(next(loaded.model.parameters()).device)
            settings["precision"] = "bfloat16" if native else "float32"
        return self.model_copy(update=settings)
