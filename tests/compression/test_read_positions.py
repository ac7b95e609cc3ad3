"""Of the last layer of a Chronos-2, forecasts need the steps ahead of what is forecast alone."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import fold_moments, layer_walk
from tscompress.compression.apply import apply_fold_
from tscompress.compression.calibration import run_teacher_forced
from tscompress.compression.fold import refit_
from tscompress.compression.fold_config import FoldConfig
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.layer_walk import Step, reconstruction, walk
from tscompress.compression.recording import record
from tscompress.data.batch import ForecastBatch
from tscompress.families.chronos2 import Chronos2
from tscompress.plan.layer_plans import OUTPUT_PATCHES

measure_sensitivity: Any = import_module("tscompress.budget.measure_sensitivity")

AHEAD = 2  # patches
KNOWN = torch.tensor([False, True, False, False])
INPUTS = Chronos2.inputs


@pytest.fixture
def chronos2(checkpoints: dict[str, Path]) -> LoadedModel:
    return load(checkpoints["chronos-2"])


def batch_of(loaded: LoadedModel) -> ForecastBatch:
    """Two groups of two series; of one series the future is known."""
    patch: int = loaded.model.chronos_config.output_patch_size  # type: ignore[union-attr, assignment]
    values = torch.randn(4, 8 * patch, generator=torch.Generator().manual_seed(0)).cumsum(1)
    context, ahead = values[:, : -AHEAD * patch], values[:, -AHEAD * patch :]
    nothing = torch.full_like(ahead, torch.nan)
    return ForecastBatch(
        context,
        torch.where(KNOWN[:, None], nothing, ahead),
        group_ids=torch.tensor([0, 0, 1, 1]),
        future=torch.where(KNOWN[:, None], ahead, nothing),
    )


def steps_of(loaded: LoadedModel, batch: ForecastBatch, layer: int) -> list[Step]:
    """Time attention, group attention and feed-forward of a layer, with their own streams."""
    steps = walk(loaded, record(loaded, [batch]), on_compressed=False, residual_targets=True)
    return [
        replace(step, inputs=[*step.inputs], reference=[*(step.reference or [])])
        for step in steps
        if step.block.layer == layer
    ]


def last_layer(loaded: LoadedModel) -> int:
    return max(block.layer for block in loaded.architecture.attention)


def test_each_sublayer_of_the_last_layer_counts_what_is_read_after_it(
    chronos2: LoadedModel,
) -> None:
    batch = batch_of(chronos2)
    time, group, feed_forward = steps_of(chronos2, batch, last_layer(chronos2))
    ahead = torch.zeros(time.inputs[0].shape[:2], dtype=torch.bool)
    ahead[:, -AHEAD:] = True
    asked = ahead & ~KNOWN[:, None]

    def same(found: Tensor | None, expected: Tensor) -> bool:
        return found is not None and torch.equal(found, expected)

    assert same(time.valid[0], ahead)
    assert time.key_valid[0] is None  # all
    assert same(group.valid[0], asked)
    assert same(group.key_valid[0], ahead)
    assert same(feed_forward.valid[0], asked)
    for step in steps_of(chronos2, batch, 0):
        assert step.valid[0] is None


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("where", ["past", "known", "forecast"])
def test_moments_follow_the_rows_that_count(chronos2: LoadedModel, where: str, last: bool) -> None:
    """When the stream before a feed-forward changes in the past, or ahead of one series."""
    batch = batch_of(chronos2)
    step = steps_of(chronos2, batch, last_layer(chronos2) if last else 0)[-1]
    before = fold_moments.hidden_moments(chronos2, step).hidden
    changed = step.inputs[0].clone()
    rows = {"past": (slice(None), slice(0, -AHEAD)), "known": (1,), "forecast": (0, -1)}[where]
    changed[rows] = changed[rows].flip(-1) * 3
    step.inputs = [changed]
    after = fold_moments.hidden_moments(chronos2, step).hidden
    assert torch.equal(before, after) == (last and where != "forecast")


def test_keys_of_the_last_group_attention_count_series_that_are_known(
    chronos2: LoadedModel,
) -> None:
    batch = batch_of(chronos2)
    group = steps_of(chronos2, batch, last_layer(chronos2))[1]
    before = fold_moments.attention_moments(chronos2, group)
    changed = group.inputs[0].clone()
    changed[1, -1] = changed[1, -1].flip(-1) * 3
    group.inputs = [changed]
    after = fold_moments.attention_moments(chronos2, group)
    assert torch.equal(before.queries, after.queries)
    assert not torch.allclose(before.keys, after.keys)
    assert not torch.allclose(before.values, after.values)  # of the other, which reads it


def test_distances_are_of_queries_ahead_and_all_keys(chronos2: LoadedModel) -> None:
    time = steps_of(chronos2, batch_of(chronos2), last_layer(chronos2))[0]
    found = fold_moments.attention_moments(chronos2, time).distances
    length = time.inputs[0].shape[1]
    pairs = [abs(query - key) for query in range(length - AHEAD, length) for key in range(length)]
    expected = torch.bincount(torch.tensor(pairs), minlength=length) / len(pairs)
    torch.testing.assert_close(found, expected.double())


def test_a_reconstruction_takes_its_rows_from_those_that_count() -> None:
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(2, 400, 4, generator=generator) for _ in range(2)]
    counted = torch.zeros(2, 400, dtype=torch.bool)
    counted[:, -20:] = True
    among = reconstruction([streams[0]], [streams[1]], [counted], width=3)
    first, second = (stream[:, -20:] for stream in streams)
    torch.testing.assert_close(among, reconstruction([first], [second], [None], width=3))


def test_a_cut_of_the_last_layer_costs_forecasts_less(
    chronos2: LoadedModel, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than one that is fitted at all positions."""
    batch = batch_of(chronos2)
    (last,) = (b for b in chronos2.architecture.feed_forward if b.layer == last_layer(chronos2))
    expected = run_teacher_forced(chronos2, batch).quantile_preds[~KNOWN]

    def lost() -> float:
        small = load(checkpoints["chronos-2"])
        plan = fold_plan(small.model, small.architecture, hidden={last.name: 4})
        apply_fold_(small, plan, [batch], FoldConfig(damping=1e-6))
        found = run_teacher_forced(small, batch).quantile_preds[~KNOWN]
        return float((found - expected).square().mean())

    counted = lost()
    monkeypatch.setattr(Chronos2, "positions_ahead", lambda *_: None)
    monkeypatch.setattr(
        Chronos2, "inputs", lambda *given: {**INPUTS(*given), "num_output_patches": AHEAD}
    )
    assert counted < 0.5 * lost()


@pytest.mark.parametrize("univariate", [False, True])
def test_reconstructions_of_the_last_layer_are_where_it_is_read(
    chronos2: LoadedModel, monkeypatch: pytest.MonkeyPatch, univariate: bool
) -> None:
    """Of a narrower stream. Values of series that are alone need none of their other positions."""
    batch = batch_of(chronos2)
    if univariate:
        batch = replace(batch, group_ids=None)
    counted: list[int | None] = []

    def note(*given: Any, **options: Any) -> Tensor:
        mask = given[2][0]
        counted.append(None if mask is None else int(mask.sum()))
        return reconstruction(*given, **options)

    monkeypatch.setattr(layer_walk, "reconstruction", note)
    plan = fold_plan(chronos2.model, chronos2.architecture, width=20, univariate=univariate)
    apply_fold_(chronos2, plan, [batch], FoldConfig(univariate=univariate))
    asked = AHEAD * int((~KNOWN).sum())
    group = asked if univariate else AHEAD * len(KNOWN)
    assert counted == [None, None, None, None, group, asked, asked]


def test_output_patches_are_fitted_for_series_that_are_forecast(chronos2: LoadedModel) -> None:
    batch = replace(batch_of(chronos2), group_ids=None)  # no series reads another
    plan = fold_plan(chronos2.model, chronos2.architecture)
    (output,) = (entry for entry in plan.hidden if entry.name == OUTPUT_PATCHES)

    def moments(changed: int) -> Tensor:
        context = batch.context.clone()
        context[changed] = context[changed].flip(-1).cumsum(0)
        found = fold_moments.patch_moments(chronos2, [replace(batch, context=context)], output)
        return found.hidden

    before = fold_moments.patch_moments(chronos2, [batch], output).hidden
    torch.testing.assert_close(moments(1), before)
    assert not torch.allclose(moments(0), before)


def test_a_feed_forward_that_becomes_the_last_is_fitted_where_it_is_read(
    chronos2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the cost of leaving out the layer after it is measured."""
    counted: list[int] = []

    def note(step: Step, *given: Any) -> None:
        assert step.valid[0] is not None
        counted.append(int(step.valid[0].sum()))
        refit_(step, *given)

    monkeypatch.setattr(measure_sensitivity, "refit_", note)
    measure_sensitivity.measure_sensitivity(
        chronos2,
        [batch_of(chronos2)],
        fold=FoldConfig(),
        head_sizes=(),
        hidden_ratios=(),
        width_ratios=(),
        embedding_ratios=(),
        cache=None,
    )
    assert counted == [AHEAD * int((~KNOWN).sum())]


def test_where_nothing_is_asked_all_steps_ahead_count(chronos2: LoadedModel) -> None:
    batch = batch_of(chronos2)
    nothing = replace(batch, target=torch.full_like(batch.target, torch.nan))
    step = steps_of(chronos2, nothing, last_layer(chronos2))[-1]
    assert step.valid[0] is not None
    assert int(step.valid[0].sum()) == 4 * AHEAD


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt"])
def test_other_families_read_all_of_their_last_layer(
    checkpoints: dict[str, Path], family: str
) -> None:
    loaded = load(checkpoints[family])
    batch = ForecastBatch(torch.rand(2, 32), torch.rand(2, 8))
    found = record(loaded, [batch])
    assert (found.ahead, found.forecast) == ([], [])
