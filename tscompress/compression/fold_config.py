"""How folding uses calibration data."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from tscompress.checkpoints.load import LoadedModel
from tscompress.removed import without_removed


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the hardware itself multiplies in bfloat16, several times faster than in float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


#: Rounds of fitting values of all heads together (:func:`~tscompress.linalg.fold_values`).
VALUE_SWEEPS = 10


class FoldConfig(BaseModel):
    """How folding uses calibration data. ``eval/notes/folding.md`` has what each switch is worth.

    Attributes
    ----------
    refit
        What output projections are fitted to: ``none``, what the ``layer`` put out itself (not with
        a latent), or what brings the ``residual`` stream of the model folded so far back to the
        original's. Where layers are left out, what is before them is fitted to what they put out;
        unless it is ``residual``, the original is what the rest of them make.
    continuations
        What the decoder of Chronos-T5 reads after a context: the ``given`` steps, or ``both`` these
        and, after the shorter half of the contexts, a path that the original draws, as when it
        forecasts.
    frequencies
        Rotary pairs that stay: ``stock``, those that the plan says, by default a plain config's;
        ``free``, as many of those whose scores vary most, for a factored checkpoint. Experimental:
        only Chronos-2 has such pairs, and that was never measured on trained weights.
    precision
        Of feed-forwards while the model is run; by default bfloat16 where the hardware multiplies
        in it. Attention, what the layers add up to, moments and fits are float32 or float64.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    refit: Literal["residual", "layer", "none"] = "residual"
    continuations: Literal["given", "both"] = "both"
    frequencies: Literal["stock", "free"] = "stock"
    precision: Literal["float32", "bfloat16"] | None = None
    damping: float = Field(
        default=1e-2, gt=0, le=1e6, description="of the fit to the residual stream"
    )

    _removed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "query_moments": (True,),
        "centre_keys": (True,),
        "value_moments": ("attention",),
        "value_sweeps": (VALUE_SWEEPS,),
        "order": ("compressed",),
        "select": ("greedy",),
    }

    @model_validator(mode="before")
    @classmethod
    def _without_removed(cls, values: Any) -> Any:
        return without_removed(values, cls._removed)

    def resolved(self, loaded: LoadedModel) -> FoldConfig:
        """With the precision of this machine in place of null."""
        if self.precision is not None:
            return self
        native = multiplies_bfloat16(next(loaded.model.parameters()).device)
        return self.model_copy(update={"precision": "bfloat16" if native else "float32"})
