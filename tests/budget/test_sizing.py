"""A budget end to end on tiny checkpoints: what is planned and folded fits it as measured."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families_of_tests import any_family, two_stacks
from shared_fixtures import FAMILIES, Forbid, tiny_recipe

import tscompress
from tscompress.benchmark.sizes import (
    bytes_on_disk,
    count_macs,
    kv_cache_bytes,
    parameter_bytes,
    parameter_count,
)
from tscompress.benchmark.workload import Workload
from tscompress.budget import layer_removal, search, window_loss
from tscompress.budget import plan_within_budget as sizing
from tscompress.budget.candidates import Candidate
from tscompress.budget.forecast_loss import Forecasts
from tscompress.budget.measure_sensitivity import measure_sensitivity, unmeasured
from tscompress.budget.part_costs import Costs
from tscompress.budget.sensitivity import Part, Sensitivity
from tscompress.budget.window_loss import WindowLoss, joined, split_windows, with_drivers
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import fold_layers
from tscompress.compression.apply import apply_fold_, fold_planned_, second_fold
from tscompress.compression.calibration import CalibrationConfig, calibration_batches
from tscompress.compression.complete_fold_plan import complete_fold_plan
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError, PlanError
from tscompress.families.registry import adapter_of
from tscompress.plan.plan import Plan
from tscompress.plan.schedules import PlannedSchedule, parse_budget
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained

CALIBRATION = CalibrationConfig(source="synthetic", num_series=16, context_length=40, batch_size=8)
FOLD = FoldConfig()
WORKLOAD = Workload(batch_size=2, context_length=48, horizon=8, num_samples=3, repeats=1, threads=1)
LAYOUTS = ("folded", "factored")


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sensitivities are measured once a session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, measured: Path) -> Path:
    """No test writes to the home directory, nor asks how well values are fitted."""
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(measured))
    monkeypatch.setattr(fold_layers, "VALUE_SWEEPS", 1)
    return measured


def batches_of(loaded: LoadedModel) -> list[ForecastBatch]:
    return calibration_batches(loaded, CALIBRATION)


def planned(loaded: LoadedModel, budget: str, **options: Any) -> Plan:
    progress = options.pop("on_progress", lambda stage, done, total: None)
    width = options.pop("width", None)
    schedule = PlannedSchedule(budget=parse_budget(budget), **{"keep_width": True} | options)
    return sizing.plan_within_budget(
        loaded, schedule, batches_of(loaded), FOLD, WORKLOAD, progress, width=width
    )


def applied(checkpoint: Path, plan: Plan) -> LoadedModel:
    loaded = load(checkpoint)
    fold_planned_(loaded, plan, batches_of(loaded), FOLD)
    return loaded


COUNTS: dict[str, Callable[[LoadedModel], int]] = {
    "parameters": lambda loaded: parameter_count(loaded.model),
    "bytes": lambda loaded: parameter_bytes(loaded.model),
    "macs": lambda loaded: count_macs(
        loaded.forecaster, WORKLOAD.model_copy(update={"horizon": 8})
    ),
    "kv-cache": lambda loaded: kv_cache_bytes(loaded.model, WORKLOAD),
}


@pytest.mark.parametrize(
    ("measure", "layout", "ratio"),
    [
        ("parameters", "folded", 0.8),
        ("bytes", "factored", 0.5),
        ("macs", "folded", 0.5),
        ("kv-cache", "factored", 0.5),
    ],
)
def test_a_budget_is_respected_as_measured(
    checkpoint: Path, measure: str, layout: str, ratio: float
) -> None:
    """That costs are those of models of any sizes is in test_costs."""
    original = load(checkpoint)
    if measure == "kv-cache" and original.family == "chronos-2":
        pytest.skip("the family has no cache")
    plan = planned(original, f"{measure}={ratio}", layout=layout)
    small = applied(checkpoint, plan)
    found, whole = (COUNTS[measure](one) for one in (small, original))
    # No more is given up than the next size asks for: heads are halved at the worst.
    assert 0.4 * ratio * whole < found <= ratio * whole
    assert (plan.uniform_sizes is not None) or layout == "factored"
    assert plan.schedule["budget"] == f"{measure}={ratio}"
    assert plan.schedule["layout"] == layout
    # As it was asked of: the model that is planned for stays as it is.
    assert parameter_count(original.model) == parameter_count(load(checkpoint).model)


@pytest.mark.parametrize(
    ("measure", "ratio", "depth"),
    [
        ("parameters", 0.8, False),
        ("parameters", 0.1, False),
        ("bytes", 0.1, False),
        ("macs", 0.3, True),
    ],
)
def test_a_budget_may_narrow_the_stream(
    checkpoint: Path, measure: str, ratio: float, depth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache does not depend on the width."""
    original = load(checkpoint)
    # Any that is within the budget will do here: one finalist is not folded to be measured.
    monkeypatch.setattr(search, "FINALISTS", 2 if ratio == 0.8 else 1)
    plan = planned(original, f"{measure}={ratio}", keep_width=False, depth=depth)
    small = applied(checkpoint, plan)
    left, whole = (COUNTS[measure](one) for one in (small, original))
    assert left <= ratio * whole
    assert plan.uniform_sizes is not None
    found = plan.schedule["found"]
    entry = 128 if measure == "bytes" else 0  # of a head of its own, in the header
    assert left == pytest.approx(found[measure] * whole, rel=1e-3, abs=entry)
    if plan.width is None:
        assert small.config["d_model"] == original.config["d_model"]
    else:
        assert small.config["d_model"] == plan.width.kept
    if ratio == 0.1:
        assert plan.width is not None
        with pytest.raises(PlanError, match=f"{measure}={ratio}"):
            planned(original, f"{measure}={ratio}")


@any_family
def test_measured_finalists_decide_the_width(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, seen = load(checkpoint), dict[int, LoadedModel]()
    loss = Forecasts.loss

    def by_width(sign: int) -> Callable[..., float]:
        def measured(self: Forecasts, of: LoadedModel | None = None) -> float:
            if of is None:
                return loss(self)
            assert self.relative
            seen[of.config["d_model"]] = of
            return sign * of.config["d_model"]

        return measured

    found = []
    for sign in (1, -1):
        monkeypatch.setattr(Forecasts, "loss", by_width(sign))
        found.append(planned(original, "parameters=0.5", keep_width=False))
    widths = [plan.width.kept if plan.width else original.config["d_model"] for plan in found]
    assert widths == [min(seen), max(seen)]
    assert 1 < len(seen) <= 4
    for small in seen.values():  # each is a fold within the budget
        assert parameter_count(small.model) <= 0.5 * parameter_count(original.model)
    planned(original, "parameters=0.5")  # the width stays: nothing is measured
    planned(original, "parameters=0.5", layout="factored")
    assert len(seen) <= 4


@any_family
def test_a_width_is_chosen_for_sizes_by_layer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what a few widths lose once folded; sizes are then those for that width."""
    original, seen = load(checkpoint), dict[int, LoadedModel]()
    whole, loss = original.config["d_model"], Forecasts.loss

    def by_width(sign: int) -> Callable[..., float]:
        def measured(self: Forecasts, of: LoadedModel | None = None) -> float:
            if of is None or not self.relative:
                return loss(self, of)
            seen[of.config["d_model"]] = of
            return sign * of.config["d_model"]

        return measured

    def narrowed(sign: int) -> Plan:
        monkeypatch.setattr(Forecasts, "loss", by_width(sign))
        return planned(original, "parameters=0.4", layout="factored", keep_width=False)

    monkeypatch.setattr(search, "NEAR", math.inf)
    smallest, largest = narrowed(1), narrowed(-1)
    assert 1 < len(seen) <= 4
    assert min(seen) >= max(head.head_size for head in largest.heads)
    for small in seen.values():  # each is a fold within the budget
        assert parameter_count(small.model) <= 0.4 * parameter_count(original.model)
    assert smallest.width is not None
    assert smallest.width.kept == smallest.schedule["width"] == min(seen)
    asked: dict[str, Any] = {"layout": "factored", "keep_width": False}
    assert smallest == planned(original, "parameters=0.4", width=min(seen), **asked)
    assert (whole if largest.width is None else largest.width.kept) == max(seen)


def test_the_whole_stream_may_be_the_best_for_sizes_by_layer(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def by_width(self: Forecasts, of: LoadedModel | None = None) -> float:
        return -of.config["d_model"] if of is not None and self.relative else loss(self, of)

    loss = Forecasts.loss
    monkeypatch.setattr(Forecasts, "loss", by_width)
    monkeypatch.setattr(search, "FINALISTS", 9)
    monkeypatch.setattr(search, "NEAR", math.inf)
    for name in ("TSCOMPRESS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    loaded, done = load(checkpoints["chronos-t5"]), list[int]()

    def count(stage: str, now: int, total: int) -> None:
        if stage == "sensitivity":
            done.append(now)

    asked: dict[str, Any] = {"layout": "factored", "on_progress": count}
    plan = planned(loaded, "parameters=0.5", keep_width=False, **asked)
    assert done
    assert done == sorted(done)  # measured once, also where nothing is cached
    kept = planned(loaded, "parameters=0.5", layout="factored")
    assert plan.schedule | {"keep_width": True} == kept.schedule
    assert plan == kept.model_copy(update={"schedule": plan.schedule})
    assert "width" not in plan.schedule


@pytest.mark.parametrize(
    ("checkpoint", "measure", "layout"),
    [
        ("chronos-t5", "bytes", "factored"),
        ("chronos-t5", "kv-cache", "folded"),
        ("chronos-bolt", "parameters", "folded"),
        ("chronos-2", "macs", "factored"),
    ],
    indirect=["checkpoint"],
)
def test_sizes_are_chosen_for_a_width_that_is_given(
    checkpoint: Path, measure: str, layout: str
) -> None:
    """The budget is a share of the original all the same."""
    original = load(checkpoint)
    ratio, width = 0.4, 16
    before = {name: weight.clone() for name, weight in original.model.named_parameters()}
    plan = planned(original, f"{measure}={ratio}", layout=layout, width=width)
    assert all(torch.equal(w, before[name]) for name, w in original.model.named_parameters())
    assert plan.width is not None
    assert plan.width.kept == width
    small = applied(checkpoint, plan)
    assert small.config["d_model"] == width
    left, whole = (COUNTS[measure](one) for one in (small, original))
    assert 0.3 * ratio * whole < left <= ratio * whole
    entry = 128 if measure == "bytes" else 0
    assert left == pytest.approx(plan.schedule["found"][measure] * whole, rel=1e-3, abs=entry)
    with pytest.raises(PlanError, match=f"{measure}=0.01 allows"):
        planned(original, f"{measure}=0.01", layout=layout, width=width)


def test_a_width_and_sizes_by_layer_are_folded_one_after_the_other(
    checkpoint: Path, tmp_path: Path
) -> None:
    original = load(checkpoint)
    plan = planned(original, "parameters=0.4", layout="factored", width=16)
    assert plan.uniform_sizes is None
    apart, second = load(checkpoint), second_fold(original, plan)
    assert second is not None
    narrow = Plan(family=plan.family, method="fold", width=plan.width)
    fold_planned_(apart, narrow, batches_of(apart), FOLD)
    fold_planned_(apart, second, batches_of(apart), FOLD)
    expected = apart.model.state_dict()
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION, fold=FOLD)
    assert all(torch.equal(w, expected[n]) for n, w in small.model.state_dict().items())
    assert small.plan is not None
    assert small.plan.width == plan.width
    again = load(tscompress.save(small, tmp_path / "small"))
    found = again.model.state_dict()
    assert all(torch.equal(w.float(), found[n].float()) for n, w in expected.items())


def test_free_frequencies_are_those_of_the_second_fold(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Chosen for the narrower model, and kept in the plan of the original."""
    source, fold = checkpoints["chronos-2"], FoldConfig(frequencies="free")
    loaded = load(source)
    times = {block.name: 4 for block in loaded.architecture.attention if block.kind == "time"}
    plan = fold_plan(loaded.model, loaded.architecture, qk=times, width=16, free_frequencies=True)
    assert second_fold(loaded, plan) is not None
    small = tscompress.compress(source, plan=plan, calibration=CALIBRATION, fold=fold)
    assert small.plan is not None
    chosen = [head for head in small.plan.heads if head.frequencies is not None]
    assert chosen
    assert all(len(head.frequencies or ()) == head.qk_size // 2 for head in chosen)
    assert {head.d_model for head in small.plan.heads} == {24}
    again = load(tscompress.save(small, tmp_path / "small"))
    found = again.model.state_dict()
    assert all(torch.equal(w, found[name]) for name, w in small.model.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_amounts_and_stored_bytes(
    checkpoints: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """Bytes are those of the stored dtype, whatever the planning is done in."""
    source = tmp_path / "stored"
    load(checkpoints["chronos-bolt"], dtype="bfloat16").model.save_pretrained(source)
    limit = bytes_on_disk(source) * 6 // 10
    small = tscompress.compress(
        source,
        budget=PlannedSchedule(budget=f"bytes={limit}B", layout=layout),  # type: ignore[arg-type]
        calibration=CALIBRATION,
        fold=FOLD,
    )
    assert {p.dtype for p in small.model.parameters()} == {torch.bfloat16}
    assert small.recipe is not None
    assert isinstance(small.recipe.schedule, PlannedSchedule)
    saved = tscompress.save(small, tmp_path / "small")
    assert 0.4 * limit < bytes_on_disk(saved) <= limit
    assert parameter_bytes(load(saved).model) == parameter_bytes(small.model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_latency_is_settled_by_measuring(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    original = load(checkpoint)
    whole = parameter_count(original.model)
    timed: list[Candidate] = []

    def fake(loaded: LoadedModel, candidate: Candidate, workload: Workload) -> float:
        assert loaded is original
        assert workload.horizon == WORKLOAD.horizon
        timed.append(candidate)
        return candidate.costs.parameters / whole

    monkeypatch.setattr(sizing, "latency_of", fake)
    stages: list[str] = []
    plan = planned(
        original, "latency=0.7", layout=layout, on_progress=lambda stage, *_: stages.append(stage)
    )
    assert 1 < len(timed) < 20
    assert stages.count("candidates") == len(timed)
    assert parameter_count(applied(checkpoint, plan).model) <= 0.7 * whole


@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    [("chronos-t5", "folded"), ("chronos-bolt", "factored"), ("chronos-2", "folded")],
    indirect=["checkpoint"],
)
def test_quality_is_settled_by_folding_and_scoring(checkpoint: Path, layout: str) -> None:
    original = load(checkpoint)
    before = {name: weight.clone() for name, weight in original.model.named_parameters()}
    measured = 0

    def count(stage: str, done: int, total: int) -> None:
        nonlocal measured
        measured += stage == "candidates"

    plan = planned(original, "wql=40%", layout=layout, on_progress=count)
    assert 1 < measured < 25
    assert plan.changes_anything
    after = dict(original.model.named_parameters())
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    # Folded on the windows it was planned on, it is as good as it was asked to be.
    fitted, held_out = split_windows(batches_of(original))
    trial = load(checkpoint)
    apply_fold_(trial, plan, fitted, FOLD)
    held_out = with_drivers(original, held_out)
    ratios = WindowLoss(load(checkpoint), held_out).ratios(trial)
    assert ratios.worst <= 1.4
    found = plan.schedule["found"]
    assert found["measured"] == pytest.approx(ratios.worst, rel=1e-4)
    both = original.family == "chronos-2"
    assert ("measured_with_covariates" in found) == both
    assert (ratios.with_covariates is not None) == both
    assert found["parameters"] == parameter_count(trial.model) / parameter_count(original.model)
    assert "budget wql=40%:" in plan.summary()
    if original.family != "chronos-bolt":
        return
    # A stricter budget leaves more.
    strict = planned(original, "wql=5%", layout=layout)
    assert strict.parameters()[1] >= plan.parameters()[1]


@pytest.mark.parametrize(
    ("checkpoint", "layout"),
    [("chronos-bolt", "factored"), ("chronos-2", "folded")],
    indirect=["checkpoint"],
)
def test_quality_beside_a_width_is_that_of_both_cuts(
    checkpoint: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the original's, with the stream as narrow as was asked; once, for sizes by layer."""
    apply = import_module("tscompress.compression.apply")
    directions, narrowed, measured = apply.principal_directions, 0, 0

    def count(*arguments: Any) -> Any:
        nonlocal narrowed
        narrowed += 1
        return directions(*arguments)

    def tell(stage: str, done: int, total: int) -> None:
        nonlocal measured
        measured += stage == "candidates"

    monkeypatch.setattr(apply, "principal_directions", count)
    original = load(checkpoint)
    plan = planned(original, "wql=90%", layout=layout, width=20, on_progress=tell)
    if layout == "factored":
        assert measured > 2
        assert narrowed <= 2  # the copy, and a candidate of the same sizes everywhere
    assert plan.width is not None
    assert plan.width.kept == 20
    fitted, held_out = split_windows(batches_of(original))
    trial = load(checkpoint)
    fold_planned_(trial, plan, fitted, FOLD)
    assert trial.config["d_model"] == 20
    held_out = with_drivers(original, held_out)
    ratios = WindowLoss(load(checkpoint), held_out).ratios(trial)
    assert ratios.worst <= 1.9
    assert plan.schedule["found"]["measured"] == pytest.approx(ratios.worst, rel=1e-4)


@two_stacks
def test_sizes_for_a_narrower_stream_are_compared_with_the_original(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[LoadedModel | None] = []

    def note(*given: Any, original: LoadedModel | None, **options: Any) -> Sensitivity:
        compared.append(original)
        return measure_sensitivity(*given, original=original, **options)

    monkeypatch.setattr(sizing, "measure_sensitivity", note)
    loaded = load(checkpoint)
    planned(loaded, "parameters=0.6", layout="factored")
    planned(loaded, "parameters=0.5", layout="factored", width=20)
    assert compared == [None, loaded]


@two_stacks
def test_a_second_fold_is_what_is_left_of_a_narrowed_copy(checkpoint: Path) -> None:
    """That the two are the fold is tested above."""
    original = load(checkpoint)
    plan = sizes_by_layer(original, width=16)
    complete = complete_fold_plan(original.model, original.architecture, plan)
    assert second_fold(original, plan) == complete.narrowed()
    # Others are folded in one go.
    for changes in ({"width": None}, {"kept_layers": {"encoder": (0,)}}):
        assert second_fold(original, plan.model_copy(update=changes)) is None


@any_family
def test_quality_beside_a_width_of_fewer_layers(checkpoint: Path) -> None:
    plan = planned(load(checkpoint), "wql=90%", width=20, depth=True)
    assert plan.width is not None
    assert plan.schedule["found"]["measured"] <= 1.9


@two_stacks
def test_a_tighter_budget_is_never_larger(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    for layout in LAYOUTS:
        sizes = [
            planned(loaded, f"parameters={ratio}", layout=layout).parameters()[1]
            for ratio in (1, 0.9, 0.7, 0.5)
        ]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < sizes[0]


@any_family
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unreachable_budget_is_refused(checkpoint: Path, layout: str) -> None:
    with pytest.raises(PlanError, match=r"parameters=0\.01"):
        planned(load(checkpoint), "parameters=0.01", layout=layout)


def test_a_model_without_a_cache_has_none_to_save(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(tscompress.errors.TscompressError, match="cache"):
        planned(load(checkpoints["chronos-2"]), "kv-cache=0.5")


def test_whole_layers_may_go(checkpoint: Path, tmp_path: Path) -> None:
    loaded = load(checkpoint)
    ratio = {"chronos-t5": 0.15, "chronos-bolt": 0.21, "chronos-2": 0.3}[loaded.family]
    budget = f"parameters={ratio}"
    with pytest.raises(PlanError, match=budget):  # more than sizes alone can do
        planned(loaded, budget)
    plan = planned(loaded, budget, depth=True)
    assert plan.kept_layers
    assert any(len(layers) == 1 for layers in plan.kept_layers.values())
    small = tscompress.compress(checkpoint, plan=plan, calibration=CALIBRATION)
    assert parameter_count(small.model) <= ratio * parameter_count(loaded.model)
    again = load(tscompress.save(small, tmp_path / "small"))
    assert parameter_count(again.model) == parameter_count(small.model)
    assert (
        again.forecaster.predict(
            batches_of(again)[-1].context[:, None]
            if again.family == "chronos-2"
            else batches_of(again)[-1].context,
            prediction_length=8,
        )[0]
        .isfinite()
        .all()
    )


@two_stacks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_are_multiples(checkpoint: Path, layout: str) -> None:
    plan = planned(load(checkpoint), "parameters=0.8", layout=layout, multiple=8)
    assert {size for head in plan.heads for size in (head.qk_size, head.vo_size)} == {8}
    assert {hidden.kept % 8 for hidden in plan.hidden} == {0}


@any_family
def test_second_plan_reads_the_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "FINALISTS", 1)
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "own"))
    calls: list[tuple[int, int]] = []

    def count(stage: str, done: int, total: int) -> None:
        if stage == "sensitivity":
            calls.append((done, total))

    asked: dict[str, Any] = {"keep_width": False, "on_progress": count}
    first = planned(load(checkpoint), "parameters=0.6", **asked)
    total = calls[-1][1]
    assert [done for done, _ in calls] == list(range(total + 1))
    assert total > 20
    (kept,) = (tmp_path / "own" / "sensitivity").iterdir()
    stamp = kept.stat().st_mtime_ns
    calls.clear()
    assert planned(load(checkpoint), "parameters=0.6", **asked) == first
    assert calls == [(total, total)]
    # Another budget and another layout ask for no new measurements.
    planned(load(checkpoint), "macs=0.6", layout="factored", on_progress=count)
    assert calls == [(total, total)] * 2
    assert kept.stat().st_mtime_ns == stamp
    assert list((tmp_path / "own").rglob("*")) == [kept.parent, kept]


def test_windows_to_fold_on_and_to_measure_on_are_apart() -> None:
    context, target = torch.arange(24.0).view(12, 2), torch.arange(12.0).view(12, 1)
    for groups in (None, torch.arange(12) // 2):
        batch = ForecastBatch(context, target, groups)
        (fitted,), (held_out,) = split_windows([batch])
        assert len(fitted.context) + len(held_out.context) == 12
        assert 2 <= len(held_out.context) <= 4
        assert not set(fitted.context[:, 0].tolist()) & set(held_out.context[:, 0].tolist())
        if groups is not None:
            assert fitted.group_ids is not None
            assert held_out.group_ids is not None
            assert not set(fitted.group_ids.tolist()) & set(held_out.group_ids.tolist())


def test_joined_windows_are_the_same_rows_in_fewer_batches() -> None:
    rows = torch.arange(60.0).view(30, 2)
    batches = [
        ForecastBatch(rows[at : at + 3], rows[at : at + 3, :1], series=torch.arange(at, at + 3))
        for at in range(0, 21, 3)
    ]
    grouped = [
        ForecastBatch(rows[at : at + 3], rows[at : at + 3, :1], group_ids=torch.tensor([0, 0, 1]))
        for at in (21, 24, 27)
    ]
    longer = ForecastBatch(torch.zeros(2, 5), torch.zeros(2, 1), series=torch.zeros(2))
    found = joined([*batches[:3], *grouped, longer, *batches[3:]], most_rows=8)
    assert [len(one) for one in found] == [6, 3, 8, 8, 5, 2]
    ids = [one.group_ids for one in found if one.group_ids is not None]
    assert [one.tolist() for one in ids] == [[0, 0, 1, 2, 2, 3], [0, 0, 1]]
    assert torch.equal(torch.cat([one.context for one in found[:2]]), rows[21:])
    alone = [one for one in found if one.group_ids is None and one.context.shape[1] == 2]
    assert torch.equal(torch.cat([one.context for one in alone]), rows[:21])
    assert torch.equal(torch.cat([one.target for one in alone]), rows[:21, :1])
    series = [one.series for one in alone]
    assert torch.equal(torch.cat([one for one in series if one is not None]), torch.arange(21))


def test_groups_of_several_batches_are_measured_together(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    held_out = with_drivers(loaded, split_windows(batches_of(loaded))[1])
    assert max(map(len, held_out)) <= CALIBRATION.batch_size
    apart = []
    for batch in held_out:
        ids = torch.arange(len(batch)) if batch.group_ids is None else batch.group_ids
        apart += [batch.rows(ids == one) for one in ids.unique()]
    assert len(apart) > len(held_out)
    together, alone = (Forecasts(loaded, part).loss() for part in (held_out, apart))
    assert together == pytest.approx(alone, rel=1e-5)


def test_windows_held_out_of_several_batches_are_measured_together(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    batches = [ForecastBatch(torch.rand(8, 24), torch.rand(8, 8)) for _ in range(6)]
    _, held_out = split_windows(batches)
    assert [len(batch) for batch in held_out] == [8, 4]
    alone = [one.rows(slice(row, row + 1)) for one in held_out for row in range(len(one))]
    together, apart = (Forecasts(loaded, part).loss() for part in (held_out, alone))
    assert together == pytest.approx(apart, rel=1e-5)


def test_windows_of_a_series_stay_together() -> None:
    """Those of it that are measured on would otherwise have been fitted to in part."""
    series = torch.tensor([0, -1, 0, 3, 1, 1, 3, -1, 2, 2, 0, 2])
    context = torch.arange(24.0).view(12, 2)
    batch = ForecastBatch(context, torch.zeros(12, 1), series=series)
    (fitted,), (held_out,) = split_windows([batch])
    assert fitted.series is not None
    assert held_out.series is not None
    assert len(fitted.series) + len(held_out.series) == 12
    assert set(held_out.series.tolist()) == {2, -1}  # the fourth of them
    assert 2 not in fitted.series
    # But something must be measured on.
    (fitted,), (held_out,) = split_windows([replace(batch, series=torch.zeros(12))])
    assert len(held_out.context) == 3


@pytest.mark.parametrize("layout", ["folded", "factored"])
def test_an_impossible_budget_is_refused_before_anything_is_measured(
    checkpoints: dict[str, Path], forbid: Forbid, layout: str
) -> None:
    forbid("tscompress.budget.plan_within_budget.measure_sensitivity")
    forbid("tscompress.budget.plan_within_budget.fold_planned_")
    loaded = load(checkpoints["chronos-bolt"])
    for budget in ("parameters", "macs", "kv-cache"):
        # A cache is as large at any width.
        chosen = "" if budget == "kv-cache" else r", d_model \d"
        for narrow, options in (
            (chosen, {"keep_width": False}),
            ("", {"keep_width": True}),
            (", d_model 16", {"width": 16}),
        ):
            with pytest.raises(PlanError, match=f"the smallest candidate{narrow}"):
                planned(loaded, f"{budget}=0.0001", layout=layout, **options)


def test_no_width_is_tried_that_saves_nothing(checkpoints: dict[str, Path], forbid: Forbid) -> None:
    """By layer; a cache is as large at any width."""
    forbid("tscompress.budget.plan_within_budget.fold_planned_")
    plan = planned(
        load(checkpoints["chronos-bolt"]), "kv-cache=0.5", layout="factored", keep_width=False
    )
    assert plan.width is None


def test_widths_near_the_best_are_folded_and_the_whole_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of predicted losses of 1, 1.4 and 1.6, and of a whole stream far behind.

    Each is predicted by what sizes lose at its width.
    """
    predicted = {None: 3.0, 48: 1.0, 32: 1.4, 24: 1.6}
    costs, narrow = (
        SimpleNamespace(original=Costs(parameters=count), family="chronos-bolt") for count in (2, 1)
    )
    parts = [SimpleNamespace(kind="qk", size=8)]
    sensitivity: Any = SimpleNamespace(parts=parts, of_width=lambda width: width)
    whole: Any = costs
    monkeypatch.setattr(
        search,
        "widths_of",
        lambda *_: [(width, 0.0, narrow if width else costs) for width in predicted],
    )

    def sized(found: Any, costs: Any, _: Any, *, width: int | None, **__: Any) -> Candidate:
        assert found == (sensitivity if width is None else width)
        assert costs is (whole if width is None else narrow)
        return Candidate(8, 8, 8, None, predicted[width], Costs(), width)

    monkeypatch.setattr(search, "choose_factored", sized)
    folded: list[int | None] = []

    def loss(one: Candidate) -> float:
        folded.append(one.width)
        return {48: 5.0, 32: 4.0, None: 4.5}[one.width]

    chosen = search.choose_width_by_layer(
        sensitivity, whole, parse_budget("parameters=0.5"), lambda _: whole, measure_loss=loss
    )
    assert folded == [48, 32, None]
    assert chosen.width == 32


@pytest.mark.parametrize("budget", ["latency=1.0", "wql=90%"])
def test_no_width_is_chosen_for_sizes_by_layer_that_are_measured(
    checkpoints: dict[str, Path], forbid: Forbid, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    forbid("tscompress.budget.plan_within_budget.choose_width_by_layer")
    monkeypatch.setattr(sizing, "latency_of", lambda *_: 0.5)
    for layout in LAYOUTS:
        schedule = PlannedSchedule(budget=parse_budget(budget), layout=layout)
        assert schedule.may_narrow == (layout == "folded")
    loaded = load(checkpoints["chronos-bolt"])
    assert planned(loaded, budget, layout="factored", keep_width=False).width is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_width_below_the_heads_is_refused_before_anything_is_folded(
    checkpoints: dict[str, Path], forbid: Forbid, layout: str
) -> None:
    """Heads are measured whole, and are no larger than the stream."""
    forbid("tscompress.budget.plan_within_budget.fold_planned_")
    with pytest.raises(PlanError, match="width 6 is below the head size 8"):
        planned(load(checkpoints["chronos-bolt"]), "parameters=0.4", layout=layout, width=6)


@pytest.mark.parametrize("width", [None, 16])
def test_the_original_is_no_answer_to_a_budget_that_nothing_meets(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    whole = parameter_count(loaded.model)
    monkeypatch.setattr(
        sizing, "latency_of", lambda _, one, __: 1.0 if one.costs.parameters == whole else 2.0
    )
    with pytest.raises(PlanError, match="measured candidates"):
        planned(loaded, "latency=1.0", layout="factored", width=width)


@two_stacks
def test_a_plan_by_layer_narrower_than_its_heads_is_folded_in_one_go(checkpoint: Path) -> None:
    """In two the narrower model would have heads larger than its stream."""
    loaded = load(checkpoint)
    small = sizes_by_layer(loaded, width=6)
    fold_planned_(loaded, small, batches_of(loaded), FOLD)
    assert loaded.config["d_model"] == 6


@two_stacks
def test_layers_that_a_plan_leaves_out_change_nothing(checkpoint: Path) -> None:
    """Of a width with sizes by layer: in a plan that names all layers, and in one that does not."""
    weights = []
    for complete in (True, False):
        loaded = load(checkpoint)
        plan = sizes_by_layer(loaded, width=16)
        if not complete:
            named = [head for head in plan.heads if not head.unchanged]
            plan = plan.model_copy(update={"heads": tuple(named), "hidden": ()})
        fold_planned_(loaded, plan, batches_of(loaded), FOLD)
        weights.append(loaded.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def sizes_by_layer(loaded: LoadedModel, width: int) -> Plan:
    """One attention block at heads of 4, the others whole."""
    first = next(block.name for block in loaded.architecture.attention if block.kind != "time")
    sizes = {first: 4}
    return fold_plan(loaded.model, loaded.architecture, qk=sizes, vo=sizes, width=width)


def test_what_is_reached_before_anything_is_measured_is_reached_after(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with sizes that no stock checkpoint has."""
    monkeypatch.setattr(Forecasts, "loss", lambda forecasts: forecasts.base)
    loaded = load(checkpoints["chronos-2"])
    batches = batches_of(loaded)[:1]
    for frequencies in ("free", "stock"):
        fold = FoldConfig(frequencies=frequencies)
        measured = measure_sensitivity(loaded, batches, fold=fold, layers=False, cache=None)
        before = unmeasured(loaded, fold, layers=False)
        sizes = [{(p.name, p.kind, p.sizes) for p in found.parts} for found in (before, measured)]
        assert sizes[0] == sizes[1]
        assert before.settings["fold"]["frequencies"] == measured.settings["fold"]["frequencies"]


class Measured(Exception):
    """Carries the windows of a loss that is about to be measured."""


@pytest.mark.parametrize("univariate", [False, True])
def test_covariates_do_not_decide_on_layers_of_a_model_that_reads_none(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, univariate: bool
) -> None:
    def stop(*_: object, holdout: Sequence[ForecastBatch], **__: object) -> Sensitivity:
        raise Measured(holdout)

    monkeypatch.setattr(layer_removal, "measure_sensitivity", stop)
    loaded = load(checkpoints["chronos-2"])
    values = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).cumsum(1)
    batches = [ForecastBatch(values[:, :32], values[:, 32:])]
    with pytest.raises(Measured) as caught:
        layer_removal.layers_that_stay(loaded, (1,), batches, FoldConfig(univariate=univariate))
    assert any(batch.future is not None for batch in caught.value.args[0]) != univariate


def test_a_model_that_reads_covariates_is_measured_on_groups(
    checkpoints: dict[str, Path],
) -> None:
    for family, rows in (("chronos-2", 60), ("chronos-bolt", 0)):
        loaded = load(checkpoints[family])
        values = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)).cumsum(1)
        alone = ForecastBatch(values[:, :32], values[:, 32:])
        grouped = replace(alone, group_ids=torch.arange(60) // 2)
        found = with_drivers(loaded, [alone, grouped])
        more = [batch for batch in found if batch.future is not None]
        assert sum(map(len, found)) == 120 + rows
        assert sum(map(len, more)) == rows
        if not rows:
            assert found == [alone, grouped]
            continue
        (both,) = more  # a batch together: with covariates known ahead, then with leading series
        for batch, ahead in ((both.rows(slice(40)), True), (both.rows(slice(40, 60)), False)):
            assert batch.future is not None
            assert batch.group_ids is not None
            known = torch.isfinite(batch.future).all(1)
            assert bool(known.any()) == ahead
            asked = torch.isfinite(batch.target).all(1)
            sizes = torch.bincount(batch.group_ids)[batch.group_ids]
            assert not (known & asked).any()
            assert batch.driven[sizes > 1].all()  # each has a covariate, and what it drives
            assert asked.any()
            assert (~asked).any()


def test_windows_know_their_series(checkpoints: dict[str, Path]) -> None:
    rng = np.random.default_rng(0)
    given = [1000 * k + rng.random(200).astype(np.float32) for k in range(1, 6)]
    config = CalibrationConfig(num_series=60, context_length=32)
    batches = calibration_batches(load(checkpoints["chronos-bolt"]), config, given)
    for batch in batches:
        assert batch.series is not None
        assert torch.equal(batch.context[:, -1] // 1000 - 1, batch.series.float())
    fitted, held_out = (
        {int(value) for batch in part for value in batch.context[:, -1] // 1000}
        for part in split_windows(batches)
    )
    assert fitted
    assert held_out
    assert not fitted & held_out
    few = config.model_copy(update={"num_series": 5})
    for batch in calibration_batches(load(checkpoints["chronos-bolt"]), few, given):
        assert batch.series is not None
        assert set(batch.series.tolist()) == {-1}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_forecasts_meet_no_budget(
    value: float, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    batches = batches_of(loaded)
    base = WindowLoss(loaded, batches)
    plain = window_loss.batch_quantiles

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        forecast = plain(*arguments, **options)
        forecast[0, 0] = value
        return forecast

    monkeypatch.setattr(window_loss, "batch_quantiles", broken)
    assert not base.ratios(loaded).worst <= 1e9
    with pytest.raises(DataError, match="WQL"):
        WindowLoss(loaded, batches)


def test_a_latency_budget_is_of_the_models_device(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    loaded.model.to("meta")  # for want of a GPU
    assert sizing.workload_for(loaded, Workload()).device == "meta"


def test_few_series_are_refused(checkpoints: dict[str, Path]) -> None:
    series = [np.sin(np.arange(40) / 3).astype(np.float32)] * 3
    with pytest.raises(DataError, match="four"):
        tscompress.compress(
            checkpoints["chronos-bolt"],
            budget="parameters=0.5",
            series=series,
            calibration=CALIBRATION,
        )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [3, 32])
@pytest.mark.parametrize("count", [4, 12])
def test_four_series_are_enough(
    checkpoints: dict[str, Path], family: str, count: int, batch_size: int
) -> None:
    """However they are batched and grouped."""
    loaded = load(checkpoints[family])
    rng = np.random.default_rng(0)
    series = [rng.normal(size=60).astype(np.float32) + 5 for _ in range(count)]
    config = CALIBRATION.model_copy(update={"batch_size": batch_size})
    fitted, held_out = split_windows(calibration_batches(loaded, config, series))
    rows = [sum(len(batch.context) for batch in part) for part in (fitted, held_out)]
    assert sum(rows) == count
    assert rows[0] >= rows[1] > 0
    assert all(torch.isfinite(batch.target).any() for batch in held_out)
    if count == 4 and batch_size == 3 and family != "chronos-t5":  # other tests plan on more
        budget = PlannedSchedule(budget=parse_budget("parameters=0.9"), keep_width=True)
        tscompress.compress(loaded, budget=budget, series=series, calibration=config)


def test_a_series_after_zeros_does_not_outweigh_all_others(checkpoints: dict[str, Path]) -> None:
    original, other = (load(checkpoints["chronos-bolt"]) for _ in range(2))
    with torch.no_grad():
        for name, weight in other.model.named_parameters():
            if name.endswith("self_attention.o.weight") or name.endswith(
                "EncDecAttention.o.weight"
            ):
                weight.mul_(-5)
    batches = batches_of(original)
    alone = WindowLoss(original, batches).ratios(other).worst
    assert abs(alone - 1) > 1e-3
    length, horizon = batches[-1].context.shape[1], batches[-1].target.shape[1]
    started = ForecastBatch(torch.zeros(1, length), torch.full((1, horizon), 5.0))
    nothing = ForecastBatch(torch.zeros(1, length), torch.zeros(1, horizon))
    with_zeros = WindowLoss(original, [*batches, started, nothing]).ratios(other).worst
    assert abs(with_zeros - 1) > 0.5 * abs(alone - 1)
    with pytest.raises(DataError, match="WQL"):
        WindowLoss(original, [nothing])


def test_groups_are_forecast_as_groups(checkpoints: dict[str, Path]) -> None:
    """Else group attention sees one key, and its queries and keys would cost nothing."""
    original, other = (load(checkpoints["chronos-2"]) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in other.model.named_parameters():
            if name.endswith("layer.1.self_attention.q.weight"):
                weight.copy_(3 * torch.randn_like(weight))
    batches = batches_of(original)
    assert any(batch.group_ids is not None for batch in batches)
    assert WindowLoss(original, batches).ratios(other).worst != 1.0
    alone = [ForecastBatch(batch.context, batch.target) for batch in batches]
    assert WindowLoss(original, alone).ratios(other) == (1.0, None)


def test_rows_of_groups_come_back_in_their_order(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    batch = batches_of(loaded)[0]
    mixed = ForecastBatch(batch.context, batch.target, torch.arange(len(batch.context)) % 2)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    sorted_rows = ForecastBatch(mixed.context[order], mixed.target[order], ids)
    found, expected = (window_loss.batch_quantiles(loaded, one, 0) for one in (mixed, sorted_rows))
    torch.testing.assert_close(found[order], expected)


def test_plan_records_costs_of_the_budget(checkpoints: dict[str, Path]) -> None:
    original = load(checkpoints["chronos-bolt"])
    plan = planned(original, "parameters=0.6")
    found = plan.schedule["found"]
    small = applied(checkpoints["chronos-bolt"], plan)
    assert found["parameters"] == parameter_count(small.model) / parameter_count(original.model)
    assert "measured" not in found
    assert "budget parameters=0.6:" in plan.summary()
    assert f"parameters {found['parameters']:.3f}" in plan.summary()


def test_free_frequencies_allow_more_sizes(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-2"])
    free = FOLD.model_copy(update={"frequencies": "free"})
    batches = batches_of(loaded)
    found = sizing.sensitivities(loaded, calibration=CALIBRATION, fold=free)
    turned = {head.name for head in sizing.fold_plan(loaded.model, loaded.architecture).heads
              if head.kind == "time"}  # fmt: skip
    tried = [part.sizes for part in found.parts if part.kind == "qk" and part.name in turned]
    assert tried
    assert all(6 in sizes for sizes in tried)  # of eight, which no plain config has
    whole = parameter_count(loaded.model)
    for keep_width in (True, False):
        schedule = PlannedSchedule(
            budget=parse_budget("parameters=0.4"), layout="factored", keep_width=keep_width
        )
        plan = sizing.plan_within_budget(loaded, schedule, batches, free, WORKLOAD)
        assert (plan.width is None) == keep_width
        made = copy.deepcopy(loaded)
        apply_fold_(made, plan, batches, free)
        assert parameter_count(made.model) <= 0.4 * whole


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-2"])
def test_the_loss_of_cuts_is_measured_on_as_many_windows_as_the_family_says(
    checkpoints: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many, all shapes of them; layers are fitted, and candidates folded, on all."""
    loaded = load(checkpoints[family])
    fewer = replace(adapter_of(family).defaults, loss_windows=4)
    measured, folded = list[int](), list[int]()
    shapes = list[set[tuple[int, ...]]]()

    def count(batches: Sequence[ForecastBatch]) -> int:
        return sum(len(batch.context) for batch in batches)

    def measure(_: LoadedModel, fitted: Sequence[ForecastBatch], **options: Any) -> Sensitivity:
        folded.append(count(fitted))
        measured.append(count(options["holdout"]))
        shapes.append({(*b.context.shape[1:], *b.target.shape[1:]) for b in options["holdout"]})
        return unmeasured(loaded, FOLD, layers=False)

    def fold_planned(
        model: LoadedModel, plan: Plan, batches: Any, fold: FoldConfig, *progress: Any
    ) -> None:
        folded.append(count(batches))

    monkeypatch.setattr(sizing, "measure_sensitivity", measure)
    monkeypatch.setattr(sizing, "fold_planned_", fold_planned)
    monkeypatch.setattr(search, "FINALISTS", 2)
    many = CALIBRATION.model_copy(update={"num_series": 64})
    given = calibration_batches(loaded, many)
    fitted, held_out = split_windows(given)
    everything = count(with_drivers(loaded, held_out))
    sizing.sensitivities(loaded, calibration=many, fold=FOLD)
    monkeypatch.setattr(adapter_of(family), "defaults", fewer)
    sizing.sensitivities(loaded, calibration=many, fold=FOLD)
    assert measured[0] == everything  # 64 are few by default
    assert len(shapes[0]) <= measured[1] < everything
    assert shapes[0] == shapes[1]
    schedule = PlannedSchedule(budget=parse_budget("parameters=0.5"))
    sizing.plan_within_budget(loaded, schedule, given, FOLD, WORKLOAD)
    assert measured[2] == measured[1]
    assert len(folded) > len(measured)  # candidates, too
    assert set(folded) == {count(fitted)}


# --------------------------------------------------------------------------------------------------
# So many layers
# --------------------------------------------------------------------------------------------------


def test_layers_are_dropped_one_by_one_and_others_fitted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(checkpoint, dtype="float32")
    batches = batches_of(loaded)
    stacks = ("encoder",) if loaded.family == "chronos-2" else ("encoder", "decoder")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    measured: list[Sensitivity] = []
    models: list[LoadedModel] = []

    def measure(model: LoadedModel, *args: Any, **options: Any) -> Sensitivity:
        models.append(model)
        measured.append(measure_sensitivity(model, *args, **options))
        assert options["original"] is (loaded if models[1:] else None)
        return measured[-1]

    monkeypatch.setattr(layer_removal, "measure_sensitivity", measure)
    seen: list[tuple[str, int, int]] = []
    kept = layer_removal.layers_that_stay(
        loaded, (1,), batches, FOLD, lambda stage, done, total: seen.append((stage, done, total))
    )
    progress = [line for line in seen if line[0] == "layers"]
    assert {stack: len(layers) for stack, layers in kept.items()} == dict.fromkeys(stacks, 1)
    assert progress == [("layers", done, len(stacks)) for done in range(len(stacks) + 1)]
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    first = {part.name: part.losses[0] for part in measured[0].parts if part.sizes}
    may_go = ["decoder"] if loaded.family == "chronos-t5" else stacks
    assert {name.split(".")[0] for name in first} == {*may_go}
    stack, _, gone = min(first, key=first.__getitem__).split(".")
    assert int(gone) not in kept[stack]
    if len(stacks) == 2:  # the second is measured on a model that lacks the first, and was fitted
        (other,) = {*stacks} - {stack}
        assert {part.name.split(".")[0] for part in measured[1].parts if part.sizes} == {other}
        fitted: Any = models[1].model
        assert len(fitted.get_submodule(stack).block) == 1
        stayed = loaded.model.get_submodule(f"{stack}.block.{kept[stack][0]}")
        ours = fitted.get_submodule(f"{stack}.block.0")
        assert not all(
            torch.equal(value, dict(ours.named_parameters())[name])
            for name, value in stayed.named_parameters()
            if "bias" not in name
        )


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_indices_of_layers_are_the_original_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    recipe = tiny_recipe(family)
    sizes = {"num_layers": 4, "num_decoder_layers": 4}
    shape = recipe.architecture.model_copy(update=sizes)
    path = tmp_path / f"four-{family}"
    save_pretrained(build_model(recipe.model_copy(update={"architecture": shape})), path)
    loaded = load(path, dtype="float32")
    #: Of each pass, the layer that is missed least, by its place among those that are left.
    least = iter(["decoder.block.1", "decoder.block.2", "decoder.block.0", "encoder.block.3"])
    asked: list[Any] = []

    def measure(trial: LoadedModel, *_: Any, layers: Sequence[str], **options: Any) -> Any:
        name = next(least)
        asked.append((len(trial.model.encoder.block), len(trial.model.decoder.block), layers))
        assert options["fold"] == FOLD.model_copy(update={"refit": "none"})
        parts = [
            Part(name=f"{stack}.block.{i}", kind="layer", size=1, sizes=(0,),
                 losses=(-1.0 if f"{stack}.block.{i}" == name else 0.0,))
            for stack in layers
            for i in range(len(getattr(trial.model, stack).block))
        ]  # fmt: skip
        return Sensitivity(family=trial.family, base_loss=1.0, parts=tuple(parts), settings={})

    monkeypatch.setattr(layer_removal, "measure_sensitivity", measure)
    plain = FOLD.model_copy(update={"refit": "none"})
    kept = layer_removal.layers_that_stay(loaded, (3, 1), batches_of(loaded), plain)
    assert kept == {"encoder": (0, 1, 2), "decoder": (2,)}  # 1, then the third of 0 2 3, then 0
    assert [(encoder, decoder) for encoder, decoder, _ in asked] == [(4, 4), (4, 3), (4, 2), (4, 1)]
    both = ["encoder", "decoder"]
    first = ["decoder"] if family == "chronos-t5" else both
    assert [layers for *_, layers in asked] == [first, both, both, ["encoder"]]


@two_stacks
@pytest.mark.parametrize("counts", [(2,), (2, 2), (0, 1), (3, 1), (1, 3)])
def test_impossible_layer_counts_are_refused(checkpoint: Path, counts: tuple[int, ...]) -> None:
    loaded = load(checkpoint)
    with pytest.raises(PlanError, match=f"layers {','.join(map(str, counts))} "):
        layer_removal.layers_that_stay(loaded, counts, [], FOLD)


def test_a_t5_keeps_as_many_encoder_layers_as_its_decoder_has(
    checkpoints: dict[str, Path],
) -> None:
    with pytest.raises(PlanError, match="encoder"):
        layer_removal.layers_that_stay(load(checkpoints["chronos-t5"]), (1, 2), [], FOLD)


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("chronos-bolt", {"rank": 4, "ff_ratio": 0.5}),
        ("chronos-bolt", {"schedule": "fit=0.3"}),
    ],
    indirect=["checkpoint"],
)
def test_fewer_layers_in_a_checkpoint(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    given = load(checkpoint)
    counts = 1 if given.family == "chronos-2" else (2, 1)
    small = tscompress.compress(checkpoint, layers=counts, calibration=CALIBRATION, **options)
    asked = [1] if given.family == "chronos-2" else [2, 1]
    assert small.plan is not None
    assert small.recipe is not None
    assert small.plan.schedule["layers"] == asked
    kept = small.plan.kept_layers
    assert [len(layers) for layers in kept.values()] == asked
    if "schedule" in options:  # a factored checkpoint
        return
    tscompress.save(small, tmp_path / "small")
    read = load(tmp_path / "small")
    assert [len(getattr(read.model, stack).block) for stack in kept] == asked
    assert Plan.load(tmp_path / "small" / "plan.json") == small.plan
    assert read.model.config.d_kv == options.get("rank", given.model.config.d_kv)
