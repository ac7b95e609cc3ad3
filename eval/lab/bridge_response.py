"""How reference/chronos2 responds to covariates, and what smaller ones keep of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from verdicts import Found, Verdict, listed

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.load import LoadedModel, cast_parameters_
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    legend_beside,
    new_figure,
    style_axes,
)
from tscompress.probing.measure import probe
from tscompress.probing.regressions import GROUP
from tscompress.probing.responses import ResponseScore
from tscompress.probing.results import ProbeResult
from tscompress.probing.skill import Estimate
from tscompress.probing.tables import kept_interval

REFERENCE = "reference/chronos2"
ORIGINAL, FOLDED, RANK_1 = "original", "folded at full rank", "group q, k of rank 1"
#: Residual-stream width and share of the hidden units of each strength.
STRENGTHS: dict[str, tuple[int | None, float]] = {
    "d_ff 50%": (None, 0.5),
    "d_model 160, d_ff 50%": (160, 0.5),
    "d_model 128, d_ff 25%": (128, 0.25),
}
#: Of forecasts, after folding at full rank.
ROUNDING = 1e-5
#: Whether a cut is noticed; of the other strengths, that it is.
_EXPECTED = {
    RANK_1: "acceptance of the probe",
    "d_ff 50%": "not expected: series meet in attention, not in hidden units",
}
#: Slope of the control, at most.
NO_RESPONSE = 0.1
#: Groups of a task with --quick.
FEW = 24


def response(quick: bool) -> Found:
    """Slopes, leakage, regret and association of each model, and what is kept."""
    results: dict[str, ProbeResult] = {}
    shares: dict[str, float] = {}
    for name, share, result in probed(quick):
        results[name], shares[name] = result, share
        _say(result, results[ORIGINAL])
    return found(results, shares)


def probed(quick: bool) -> Iterator[tuple[str, float, ProbeResult]]:
    """Name, share of the original's parameters, and what the probe finds, of each model."""
    original = tscompress.load(REFERENCE, dtype="float32")
    count = parameter_count(original.model)
    for name, model in _models(original):
        cast_parameters_(model.model, torch.float32)
        series = FEW if quick else None
        result = probe(model, [GROUP, "covariates"], num_series=series, name=name)
        yield name, parameter_count(model.model) / count, result


def found(results: dict[str, ProbeResult], shares: dict[str, float]) -> Found:
    """Verdicts, table and figure of all models."""
    rows = [row for name in results for row in _rows(results[name], results, shares[name])]
    return Found(_verdicts(results), pd.DataFrame(rows), _figure(results))


def _models(original: LoadedModel) -> Iterator[tuple[str, LoadedModel]]:
    yield ORIGINAL, original
    yield FOLDED, refolded()
    for name, (width, ff_ratio) in STRENGTHS.items():
        yield name, tscompress.compress(REFERENCE, width=width, ff_ratio=ff_ratio)
    across = [block.name for block in original.architecture.attention if block.across_series]
    ranks = fold_plan(original.model, original.architecture, qk=dict.fromkeys(across, 1))
    yield RANK_1, tscompress.compress(REFERENCE, plan=ranks)


def refolded() -> LoadedModel:
    """Folded at full rank in float32; ``compress`` would store bfloat16, as the original is."""
    model = tscompress.load(REFERENCE, dtype="float32")
    plan = fold_plan(model.model, model.architecture)
    batches = calibration_batches(model, CalibrationConfig())
    fold_(model, plan, batches, FoldConfig(precision="float32"))
    return model


def _say(result: ProbeResult, original: ProbeResult) -> None:
    kept_of = result.against(original).response
    assert kept_of is not None
    kept = kept_interval(kept_of.slope_kept), kept_interval(kept_of.gain_kept)
    print(f"{result.model}: slope kept {kept[0]}, gain kept {kept[1]}", flush=True)


def _rows(
    result: ProbeResult, results: dict[str, ProbeResult], share: float
) -> Iterator[dict[str, Any]]:
    comparison = result.against(results[ORIGINAL])
    assert comparison.response is not None
    for score, change in zip(result.responses, comparison.response.tasks, strict=True):
        kept = {"slope kept": change.slope_kept, "gain kept": change.gain_kept}
        yield {
            "model": result.model,
            "parameters": share,
            "task": score.name,
            **numbers("slope", score.slope),
            **numbers("R²", score.r_squared),
            **numbers("leakage", score.leakage),
            **numbers("regret", score.regret),
            **numbers("bias taken", score.association),
            "slope, shuffled": score.shuffled_slope.value,
            "regret, shuffled": score.shuffled_regret.value,
            "bias of ridge regression": score.ridge_association,
            "bias of 2SLS": score.two_stage_association,
            **{key: value for name, one in kept.items() for key, value in
               numbers(name, one).items()},
        }  # fmt: skip
    yield {
        "model": result.model,
        "parameters": share,
        "task": "all",
        **numbers("slope kept", comparison.response.slope_kept),
        **numbers("gain kept", comparison.response.gain_kept),
        **numbers("covariates' skill kept", comparison.covariates_kept),
    }


def numbers(name: str, one: Estimate | None) -> dict[str, float | None]:
    """Columns of an estimate and the ends of its interval."""
    values = (None, None, None) if one is None else (one.value, one.low, one.high)
    return dict(zip((name, f"{name}, low", f"{name}, high"), values, strict=True))


# --------------------------------------------------------------------------------------------------
# Verdicts
# --------------------------------------------------------------------------------------------------


def _verdicts(results: dict[str, ProbeResult]) -> list[Verdict]:
    original = results[ORIGINAL].responses
    return [
        _control(original),
        *_size_and_place(original),
        *(v for score in original if score.task.confounded for v in _association(score)),
        _full_rank(results),
        *(_noticed(results, name) for name in (RANK_1, *STRENGTHS)),
    ]


def _control(scores: Sequence[ResponseScore]) -> Verdict:
    slopes = [one.shuffled_slope.value for one in scores]
    regrets = [one.shuffled_regret.value for one in scores]
    return Verdict(
        "Response, control", "with covariates in another order no forecast responds or gains",
        f"slopes {listed(slopes)}; regrets {listed(regrets, 3)}",
        f"slopes within ±{NO_RESPONSE:g}, regrets at least 1",
        max(map(abs, slopes)) <= NO_RESPONSE and min(regrets) >= 1,
    )  # fmt: skip


def _size_and_place(scores: Sequence[ResponseScore]) -> list[Verdict]:
    plain = [one for one in scores if not one.task.confounded]
    leaks = [0.0 if one.leakage is None else one.leakage.value for one in plain]
    names = ", ".join(one.name for one in plain)
    return [
        Verdict(
            "Response, size", "reference/chronos2 responds as much as the best forecast",
            f"slopes {'; '.join(str(one.slope) for one in plain)} at {names}",
            "1 within each interval; not expected of a small model",
            all(_has_one(one.slope.low, one.slope.high) for one in plain), should=False,
        ),
        Verdict(
            "Response, place", "most of its response is at the step of the shift",
            f"leakage {listed(leaks)} at {names}",
            "below 0.5 each; not expected, because a patch is 16 steps and one token",
            max(leaks) < 0.5, should=False,
        ),
    ]  # fmt: skip


def _association(score: ResponseScore) -> list[Verdict]:
    beside = "with an instrument beside" if score.task.instrument else "without an instrument"
    limits = f"least squares on x alone has {score.task.least_squares_limit:.2g} in the limit"
    if score.task.instrument:
        limits += f", 2SLS 0 ({score.two_stage_association:.2f} on these contexts)"
    share = score.association
    measured = "no response to tell" if share is None else f"bias taken {share}"
    low, high = (None, None) if share is None else (share.low, share.high)
    return [
        Verdict(
            "Endogenous covariates", f"the response is not to the causal effect, {beside}",
            measured, "above 0: right for forecasts, wrong for interventions",
            low is not None and low > 0,
        ),
        Verdict(
            "Endogenous covariates", f"it is to the association of the best forecast, {beside}",
            f"{measured}; ridge regression {score.ridge_association:.2f}; {limits}",
            "1 within the interval", _has_one(low, high),
        ),
    ]  # fmt: skip


def _has_one(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low <= 1 <= high


def _full_rank(results: dict[str, ProbeResult]) -> Verdict:
    before, after = (
        np.concatenate([one.columns.implied for one in results[name].responses])
        for name in (ORIGINAL, FOLDED)
    )
    change = float(np.abs(before - after).max())
    return Verdict(
        "Kept, full rank", "folding at full rank changes no implied coefficient",
        f"largest change {change:.1e} of {len(before)} coefficients", f"below {ROUNDING:g}",
        change < ROUNDING,
    )  # fmt: skip


def _noticed(results: dict[str, ProbeResult], name: str) -> Verdict:
    """A cut must be noticed where queries and keys of group attention are gone."""
    change = results[name].against(results[ORIGINAL])
    assert change.response is not None
    lost = [one.name for one in change.response.tasks if one.change == "lost"]
    shares = [
        kept_interval(one)
        for one in (change.response.slope_kept, change.response.gain_kept, change.covariates_kept)
    ]
    return Verdict(
        f"Kept, {name}", "less of the response is left, surely, at some task",
        f"slope kept {shares[0]}, gain {shares[1]}, skill that covariates add {shares[2]}; lost at "
        + (", ".join(lost) or "none"),
        _EXPECTED.get(name, "narrower models lose it first"),
        bool(lost), should=name != "d_ff 50%",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Figure
# --------------------------------------------------------------------------------------------------


def _figure(results: dict[str, ProbeResult]) -> Figure:
    shown = [ORIGINAL, *STRENGTHS, RANK_1]
    figure = new_figure(10.4, 3.4)
    panels = figure.subplots(1, 3)
    titles = {
        "slope": "slope (1: right)",
        "leakage": "leakage to other steps",
        "regret": "regret (0: ridge, 1: mean)",
    }
    names = [score.name for score in results[ORIGINAL].responses]
    for axes, (measure, title) in zip(panels, titles.items(), strict=True):
        style_axes(axes, title=title)
        for slot, name in enumerate(shown):
            _points(axes, [getattr(one, measure) for one in results[name].responses], slot, name)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.axhline({"slope": 1, "leakage": 0, "regret": 1}[measure], color=GREY, ls=":", lw=1)
    legend_beside(figure, panels[0])
    return figure


def _points(axes: Any, estimates: Sequence[Estimate | None], slot: int, name: str) -> None:
    for index, one in enumerate(estimates):
        if one is None or one.low is None or one.high is None:
            continue
        x = index + 0.14 * (slot - 2)
        axes.plot([x, x], [one.low, one.high], color=PALETTE[slot], lw=1.2)
        axes.plot(x, one.value, MARKERS[slot], color=PALETTE[slot], ms=5,
                  label=name if index == 0 else None)  # fmt: skip
