"""Patch size against use of covariates, of small Chronos-2 models trained alike (Dange et al.)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from bridge_response import numbers
from learners import logged_lines
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from micro import RECIPES, trained
from verdicts import Found, Verdict, listed, plain_ticks

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.errors import UsageError
from tscompress.plotting import (
    GREY,
    MARKERS,
    PALETTE,
    new_figure,
    style_axes,
)
from tscompress.probing.measure import probe
from tscompress.probing.regressions import ResponseTask
from tscompress.training.pretrain_output import MODEL, snapshot_name
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.workflows.recipe import load_pretrain_recipe

PATCHES = (1, 4, 16)
#: Covariates of a group on which models are measured; they were trained with one, then with two.
COVARIATES = (1, 2)
NUM_SERIES, FEW = 512, 32
#: What the drivers of each stage are; the recipe keeps a model at the end of each.
STAGES = ("one sign", "both signs", "up to two drivers")
#: Of a stage, with --quick.
QUICK_STEPS = 3
#: Regret from which a model has learnt nothing that the mean does not say.
NOTHING = 0.9


@dataclass(frozen=True)
class Trainings:
    """Where the trainings are, and whether there may be new ones."""

    models: Path
    quick: bool
    trained_only: bool

    def recipe(self, patch: int) -> PretrainRecipe:
        """The recipe with patches of so many steps."""
        content = load_pretrain_recipe(RECIPES / "bridge.yaml").model_dump()
        content["architecture"]["patch_size"] = patch
        for stage in content["stages"] if self.quick else ():
            stage["steps"] = QUICK_STEPS
        return PretrainRecipe.model_validate(content)

    def directory(self, patch: int) -> Path:
        """Of one training."""
        return self.models / f"bridge-{patch}"

    def steps(self, patch: int) -> list[tuple[int, Path]]:
        """Steps after which a model was kept, the last one included, and where.

        Raises
        ------
        UsageError
            There is none, and ``trained_only``.
        """
        recipe, directory = self.recipe(patch), self.directory(patch)
        if not self.trained_only:
            trained(recipe, directory)
        kept = [(step, directory / snapshot_name(step)) for step in sorted(recipe.snapshot_steps)]
        kept.append((recipe.total_steps, directory / MODEL))
        found = [(step, path) for step, path in kept if path.is_dir()]
        if not found:
            raise UsageError(
                f"{str(directory)!r} holds no trained model; leave --trained-only out, or name "
                "the directory of trainings with --models."
            )
        return found


def patches(asked: Trainings, quick: bool) -> Found:
    """Regret, slope and leakage by patch size, after each stage of training."""
    rows = []
    for patch in PATCHES:
        for step, path in asked.steps(patch):
            rows += list(_rows(patch, step, load(path), FEW if quick else NUM_SERIES))
            print(f"patch {patch}, step {step}: regret {rows[-1]['regret']:.2f}", flush=True)
    frame = pd.DataFrame(rows)
    logs = {patch: logged_lines(asked.directory(patch)) for patch in PATCHES}
    return Found(_verdicts(frame), frame, _figure(frame, logs))


def _rows(patch: int, step: int, loaded: LoadedModel, count: int) -> Iterator[dict[str, Any]]:
    context, horizon = 64, 16  # as it was trained
    tasks = [
        ResponseTask(name=f"covariates-{m}", covariates=m, context_length=context,
                     horizon=horizon, num_series=count)
        for m in COVARIATES
    ]  # fmt: skip
    for score in probe(loaded, tasks).responses:
        yield {
            "patch": patch,
            "step": step,
            "covariates": score.task.covariates,
            **numbers("regret", score.regret),
            **numbers("slope", score.slope),
            **numbers("leakage", score.leakage),
            "R²": score.r_squared.value,
            "regret, shuffled": score.shuffled_regret.value,
            "slope, shuffled": score.shuffled_slope.value,
        }


# --------------------------------------------------------------------------------------------------
# Verdicts and figure
# --------------------------------------------------------------------------------------------------


def last_common(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the last step at which there is a model of each patch size."""
    counts = frame.groupby("step")["patch"].nunique()
    whole = counts[counts == counts.max()].index
    return frame[frame["step"] == whole.max()]


def _verdicts(frame: pd.DataFrame) -> list[Verdict]:
    last = last_common(frame)
    step = int(last["step"].iloc[0])
    found = []
    for m, part in last.groupby("covariates"):
        found += rises(part.sort_values("patch"), int(m), step)
    slopes, regrets = last["slope, shuffled"], last["regret, shuffled"]
    found.append(Verdict(
        "Patches, control", "with covariates in another order no model responds or gains",
        f"slopes within ±{slopes.abs().max():.2f}, regrets {regrets.min():.2f} or more",
        "slopes within ±0.1, regrets at least 1",
        bool(slopes.abs().max() <= 0.1 and regrets.min() >= 1),
    ))  # fmt: skip
    return found


def rises(part: pd.DataFrame, m: int, step: int) -> Iterator[Verdict]:
    regrets, leaks = part["regret"].tolist(), part["leakage"].tolist()
    learnt = min(regrets) < NOTHING
    sizes = listed(part["patch"].tolist())
    intervals = [tuple(row) for row in part[["regret, low", "regret, high"]].to_numpy()]
    apart = intervals[0][1] < intervals[-1][0]
    shown = "; ".join(f"{value:.2f} ({low:.2f} to {high:.2f})" for value, (low, high) in
                      zip(regrets, intervals, strict=True))  # fmt: skip
    name = f"{m} covariate" + "s" * (m > 1)
    yield Verdict(
        f"Theorem 3.1 as a forecast, {name}", "regret over ridge regression rises with the patch",
        f"{shown} with patches of {sizes}, {step} steps",
        "rising, and the ends apart" + ("" if learnt else "; but no model has learnt"),
        learnt and regrets == sorted(regrets) and apart,
    )  # fmt: skip
    yield Verdict(
        f"Place of the response, {name}",
        "leakage to other steps rises with the patch",
        f"{listed(leaks)} with patches of {sizes}",
        "rising",
        leaks == sorted(leaks),
    )


def _figure(frame: pd.DataFrame, logs: dict[int, list[dict[str, Any]]]) -> Figure:
    figure = new_figure(10.4, 3.2)
    losses, regrets, leaks = figure.subplots(1, 3)
    style_axes(
        losses, xlabel="steps", ylabel="training loss", title="training, one stage after another"
    )
    for slot, (patch, lines) in enumerate(logs.items()):
        losses.plot(
            [line["step"] for line in lines], [line["loss"] for line in lines],
            color=PALETTE[slot], marker=MARKERS[slot], ms=3, lw=1.2, label=f"patch {patch}",
        )  # fmt: skip
    losses.set_xlim(left=0)
    losses.set_ylim(0, 0.66)
    for end, label in zip(sorted(frame["step"].unique()), STAGES, strict=False):
        losses.axvline(end, color=GREY, lw=0.8, ls=":")
        losses.annotate(label, (end, 0.65), (-3, 0), textcoords="offset points", ha="right",
                        va="top", fontsize=7, color=GREY)  # fmt: skip
    last = last_common(frame)
    style_axes(regrets, xlabel="patch size", ylabel="regret (0: ridge, 1: mean)",
               title="regret over ridge regression")  # fmt: skip
    style_axes(leaks, xlabel="patch size", ylabel="share at other steps", title="leakage")
    _by_patch(regrets, last, "regret")
    _by_patch(leaks, last, "leakage")
    control = last.groupby("patch")["regret, shuffled"].mean()
    regrets.plot(control.index, control, "--", color=GREY, label="control: shuffled")
    regrets.set_ylim(bottom=0)
    leaks.set_ylim(0, 1)
    handles, labels = ([*one, *two] for one, two in zip(
        losses.get_legend_handles_labels(), regrets.get_legend_handles_labels(), strict=True
    ))  # fmt: skip
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _by_patch(axes: Axes, frame: pd.DataFrame, measure: str) -> None:
    for slot, (m, part) in enumerate(frame.groupby("covariates")):
        part = part.dropna(subset=[measure, f"{measure}, low"]).sort_values("patch")
        low, high = (part[f"{measure}, {end}"] for end in ("low", "high"))
        spread: Sequence[Any] = (part[measure] - low, high - part[measure])
        axes.errorbar(
            part["patch"], part[measure], yerr=spread, color=PALETTE[slot + 3], capsize=3,
            marker=MARKERS[slot], ms=5, lw=1.3, label=f"{m} covariate" + "s" * (int(str(m)) > 1),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    plain_ticks(axes.xaxis, PATCHES)
