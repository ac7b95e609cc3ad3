"""Learners of covariates and instruments at every size of their heads, and the explicit one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from cut_figures import draw_cuts
from cut_learners import (
    LOOPS,
    Asked,
    estimators,
    explicit_subject,
    few_prompts,
    looped_subject,
    regressor_subject,
)
from cuts import METHODS, UNCUT, Subject
from verdicts import Found, Verdict, listed

from tscompress.compression.fold import fold_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.streams import layers_alone


def covariates(asked: Asked, quick: bool) -> Found:
    """S8: last index loss, response and average forecast against the size of heads."""
    subjects = [regressor_subject(*one, asked.recipe) for one in asked.regressors()]
    measures = {
        "last": "last index loss",
        "response": "response to covariates",
        "average": "error of the average forecast",
    }
    lines = {"last": {"forecasting 0": float(asked.recipe.runs()[0].task.null_loss)}}

    def draw(frame: pd.DataFrame, path: Path | None = None) -> Any:
        return draw_cuts(frame, measures, lines, path, zero=("average",), most={"last": 8.0})

    frame = asked.cuts(subjects, "covariates", draw)
    return Found([] if quick else _regression_verdicts(frame), frame, draw(frame))


def _cut(frame: pd.DataFrame, method: str, size: int | None = None, recovered: bool = False) -> Any:
    """Rows of a method, of one size if given."""
    chosen = frame[(frame["method"] == method) & (frame["recovered"] == recovered)]
    return chosen if size is None else chosen[chosen["size"] == size]


def _by_model(frame: pd.DataFrame, value: Callable[[pd.DataFrame], float]) -> dict[str, float]:
    return {str(name): value(one) for name, one in frame.groupby("model", sort=False)}


def _at(frame: pd.DataFrame, column: str, method: str, size: int, recovered: bool) -> float:
    return float(_cut(frame, method, size, recovered)[column].iloc[0])


def _whole_size(frame: pd.DataFrame) -> int:
    return int(_cut(frame, UNCUT)["size"].iloc[0])


def _kept(frame: pd.DataFrame, column: str, method: str, size: int, recovered: bool) -> float:
    """A measure of a cut over that of the original, which has had the same steps."""
    original = _at(frame, column, UNCUT, _whole_size(frame), recovered)
    return _at(frame, column, method, size, recovered) / original


def _texts(values: dict[str, float], form: str) -> str:
    return ", ".join(f"{name} {value:{form}}" for name, value in values.items())


def share_of_average(frame: pd.DataFrame, least: float = 0.01) -> float:
    """The most that the average forecast adds of what any cut adds to the loss.

    Cuts that add less than the share ``least`` of the loss of forecasting 0 are left out.
    """
    size = _whole_size(frame)
    base = {name: _at(frame, name, UNCUT, size, False) for name in ("last", "average", "skill")}
    null = base["last"] / (1 - base["skill"])
    cuts = frame[(frame["method"] != UNCUT) & ~frame["recovered"]]
    added = cuts["last"] - base["last"]
    large = added > least * null
    shares = (cuts["average"] - base["average"])[large] / added[large]
    return float(shares.max()) if large.any() else 0.0


def lost_below(frame: pd.DataFrame, method: str, recovered: bool, share: float = 0.95) -> int:
    """The largest size that keeps less than this share of the skill; 0: none."""
    for size in range(_whole_size(frame) - 1, 0, -1):
        if _kept(frame, "skill", method, size, recovered) < share:
            return size
    return 0


def wins(frame: pd.DataFrame, column: str, better: str, worse: str, recovered: bool) -> float:
    """Share of the sizes at which one method has the lower value than another."""
    pairs = zip(
        _cut(frame, better, None, recovered).sort_values("size")[column],
        _cut(frame, worse, None, recovered).sort_values("size")[column],
        strict=True,
    )
    return float(np.mean([one < other for one, other in pairs]))


def _regression_verdicts(frame: pd.DataFrame) -> list[Verdict]:
    half = _by_model(frame, lambda f: _kept(f, "skill", "fold", _whole_size(f) // 2, False))
    average = _by_model(frame, share_of_average)
    costly = _by_model(frame, lambda f: share_of_average(f, 0.1))
    most = _by_model(frame, lambda f: float(_cut(f, "fold")["last"].max()))
    null = float((frame["last"] / (1 - frame["skill"])).mean())
    order = _by_model(frame, lambda f: wins(f, "last", "fold", "activation-svd", False))
    whitened = _by_model(frame, lambda f: wins(f, "last", "activation-svd", "svd", False))
    won = _by_model(frame, _won_back)
    one = _by_model(frame, lambda f: _kept(f, "skill", "fold", 1, True))
    return [
        Verdict("folding", "half of every head is enough, without recovery",
                f"skill kept: {_texts(half, '.0%')}", "at least 95%", min(half.values()) >= 0.95),
        Verdict("what goes first", "the in-context part: the average forecast of a query stays",
                f"at most of what a cut adds to the loss: {_texts(average, '.0%')}",
                "at most 10%", max(average.values()) <= 0.1),
        Verdict("what goes first", "the same of cuts that add a tenth of forecasting 0 or more",
                f"at most: {_texts(costly, '.0%')}", "at most 15%, set after the run",
                max(costly.values()) <= 0.15),
        Verdict("folding", "at the smallest heads forecasts are no worse than the average",
                f"largest loss: {_texts(most, '.2f')}; forecasting 0 {null:.2f}",
                "at most that of forecasting 0", max(most.values()) <= null),
        Verdict("methods", "folding is better than activation-aware SVD with as many weights",
                f"at these shares of the sizes: {_texts(order, '.0%')}", "at least 80%",
                min(order.values()) >= 0.8),
        Verdict("methods", "activation-aware SVD is better than truncated SVD",
                f"at these shares of the sizes: {_texts(whitened, '.0%')}", "at least 80%",
                min(whitened.values()) >= 0.8),
        Verdict("recovery", "its steps win back half of what a cut adds to the loss, or more",
                f"in the median over cuts: {_texts(won, '.0%')}", "at least 50%",
                min(won.values()) >= 0.5),
        Verdict("recovery", "heads of 1 keep the ability once they are recovered",
                f"skill kept, folded: {_texts(one, '.0%')}", "at least 80%",
                min(one.values()) >= 0.8),
    ]  # fmt: skip


def _won_back(frame: pd.DataFrame) -> float:
    """Median over recovered cuts of the share of the added loss that recovery takes off again.

    Both losses are above those of the original, which has had the same steps.
    """
    size, shares = _whole_size(frame), []
    base = [_at(frame, "last", UNCUT, size, recovered) for recovered in (False, True)]
    for method in METHODS:
        for one in _cut(frame, method, None, True)["size"]:
            before, after = (
                _at(frame, "last", method, one, recovered) - original
                for recovered, original in zip((False, True), base, strict=True)
            )
            if before > 0.05:
                shares.append(1 - after / before)
    return float(np.median(shares)) if shares else 1.0


MEASURES_OF_INSTRUMENTS = {
    "icpe": "prediction error (ICPE)",
    "coefficient error": "coefficient error",
    "bias slope": "bias slope",
    "average": "error of the average forecast",
}


def instruments(asked: Asked, quick: bool) -> Found:
    """S9: prediction error, coefficients and bias of the trained looped transformer."""
    subjects = [looped_subject(*one, asked.recipe) for one in asked.looped()]
    lines = estimators(asked.recipe, asked.recipe.prompts)
    shown = {name: dict(values) for name, values in lines.items()}
    for values in shown.values():
        values.pop("forecasting 0")

    def draw(frame: pd.DataFrame, path: Path | None = None) -> Any:
        return draw_cuts(
            frame, MEASURES_OF_INSTRUMENTS, shown, path, zero=("average",),
            most={"icpe": 2.0, "coefficient error": 0.35, "average": 0.1}, across=True,
        )  # fmt: skip

    frame = asked.cuts(subjects, "instruments", draw)
    return Found([] if quick else _instrument_verdicts(frame, lines), frame, draw(frame))


def gain_kept(frame: pd.DataFrame, ols: float, method: str, size: int, recovered: bool) -> float:
    """Of the original's coefficient error below OLS, the share that a cut still has."""
    original = _at(frame, "coefficient error", UNCUT, _whole_size(frame), recovered)
    found = _at(frame, "coefficient error", method, size, recovered)
    return (ols - found) / (ols - original)


def _instrument_verdicts(frame: pd.DataFrame, lines: Any) -> list[Verdict]:
    first = frame[frame["model"] == frame["model"].iloc[0]]
    size = _whole_size(first)
    ols = lines["coefficient error"]["OLS"]
    recovered = _cut(first, "fold", None, True).sort_values("size", ascending=False)
    bias = dict(zip(recovered["size"], recovered["bias slope"], strict=True))
    start = [_at(first, "bias slope", UNCUT, size, recovered) for recovered in (False, True)]
    lost = lost_below(first, "fold", False)
    gain = [gain_kept(first, ols, "fold", one, False) for one in range(size - 1, 0, -1)]
    average = share_of_average(first.rename(columns={"icpe": "last"}))
    half = _kept(first, "skill", "fold", size // 2, False)
    one = _at(first, "icpe", "fold", 1, True)
    order = wins(first, "icpe", "fold", "activation-svd", False)
    return [
        Verdict("looped, original", "it is past least squares",
                f"coefficient error {_at(first, 'coefficient error', UNCUT, size, False):.3f}, OLS "
                f"{ols:.3f}, 2SLS {lines['coefficient error']['2SLS']:.3f}; bias slope "
                f"{start[0]:.2f}", "at most 90% of OLS",
                _at(first, "coefficient error", UNCUT, size, False) <= 0.9 * ols),
        Verdict("folding", "half of every head is enough, without recovery",
                f"skill kept {half:.0%}", "at least 95%", half >= 0.95),
        Verdict("what goes first", "the use of instruments, before the forecast",
                f"share of the gain on OLS at sizes {size - 1} to 1: {listed(gain)}; skill is "
                f"below 95% from size {lost} on",
                "gain below 50% where skill is still above 95%",
                bool(gain[max(size - 2 - lost, 0)] < 0.5)),
        Verdict("what goes first", "the in-context part: the average forecast of a query stays",
                f"at most {average:.0%} of what a cut adds to the prediction error",
                "at most 10%", average <= 0.1),
        Verdict("bias slope, recovered", "small heads end nearer to least squares",
                f"{start[1]:.2f} uncut; {listed(list(bias.values()))} at sizes "
                f"{', '.join(map(str, bias))}",
                "higher at size 1 than uncut, by 0.1", bias[1] > start[1] + 0.1),
        Verdict("recovery", "heads of 1 come back to least squares",
                f"ICPE {one:.2f}, OLS {lines['icpe']['OLS']:.2f}", "at most 5% above OLS",
                one <= 1.05 * lines["icpe"]["OLS"]),
        Verdict("methods", "folding is better than activation-aware SVD with as many weights",
                f"at {order:.0%} of the sizes", "at least 80%", order >= 0.8),
    ]  # fmt: skip


def explicit(asked: Asked, quick: bool) -> Found:
    """The transformer that nobody trained has exactly the ranks it needs: what does a cut do?"""
    subject = explicit_subject(asked.recipe, 4 if quick else LOOPS)
    lines = estimators(asked.recipe, few_prompts(asked.recipe))
    measures = {
        "icpe": "prediction error (ICPE)",
        "median": "median coefficient error",
    }

    def draw(frame: pd.DataFrame, path: Path | None = None) -> Any:
        return draw_cuts(
            frame, measures, {k: lines[k] for k in measures}, path,
            most={"icpe": 8.0}, zero=("icpe", "median"), across=True,
        )  # fmt: skip

    frame = asked.cuts([subject], "explicit", draw)
    return Found([] if quick else _explicit_verdicts(subject, frame, lines), frame, draw(frame))


def _explicit_verdicts(subject: Subject, frame: pd.DataFrame, lines: Any) -> list[Verdict]:
    size = _whole_size(frame)
    original = _at(frame, "median", UNCUT, size, False)
    first = {method: _at(frame, "median", method, size - 1, False) for method in METHODS}
    least = _at(frame, "response", "fold", 1, False)
    alone = values_alone(subject)
    bounds = [lines["median"][name] for name in ("2SLS", "OLS", "forecasting 0")]
    return [
        Verdict("explicit", "uncut it is 2SLS by gradient descent",
                f"median coefficient error {original:.4f}, 2SLS {bounds[0]:.4f}, OLS "
                f"{bounds[1]:.4f}", "within 10% of 2SLS", abs(original / bounds[0] - 1) < 0.1),
        Verdict("explicit", "one dimension of every head less breaks it, whatever the method",
                "median coefficient error " + _texts(first, ".3g"),
                "above that of OLS", min(first.values()) > bounds[1]),
        Verdict("explicit", "heads of 1 keep the constant that hides the query, and learn nothing",
                f"response to the regressor {least:.2f}", "below 0.05", abs(least) < 0.05),
        Verdict("explicit", "values need no more dimensions than there are instruments",
                f"largest change of a token over one block {alone:.1g}, with values folded to "
                f"{subject.learner.explicit.q_} of {size}", "below 1e-9", alone < 1e-9),
    ]  # fmt: skip


def values_alone(subject: Subject) -> float:
    """The largest change of a token over one block, with values alone folded to q dimensions."""
    learner: Any = copy.deepcopy(subject.learner)
    streams, q = subject.streams(), learner.explicit.q_
    with torch.no_grad():
        before = [learner.encoder(batch.stream) for batch in streams]
        loaded = layers_alone(learner.encoder, subject.name)
        sizes = {
            block.name: min(q, loaded.model.get_submodule(block.name).head_size)
            for block in loaded.architecture.attention
        }
        plan = fold_plan(loaded.model, loaded.architecture, vo=sizes)
        fold_(loaded, plan, streams, FoldConfig())
        after = [learner.encoder(batch.stream) for batch in streams]
    return max(float((one - two).abs().max()) for one, two in zip(before, after, strict=True))
