"""A model run one sublayer at a time gives what it gives as a whole, however it is cut up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families_of_tests import two_stacks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tscompress
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.compression import fold_moments
from tscompress.compression import layer_walk as layerwise
from tscompress.compression.calibration import (
    CalibrationConfig,
    calibration_batches,
    run_teacher_forced,
    small_batches,
)
from tscompress.compression.fold_config import FoldConfig, multiplies_bfloat16
from tscompress.compression.layer_walk import Step, runs_of, walk
from tscompress.compression.recording import Recording, RowTable, record
from tscompress.data.batch import ForecastBatch
from tscompress.families.stacks import sublayer_of

CALIBRATION = CalibrationConfig(source="synthetic", num_series=24, context_length=48, batch_size=8)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 120))
def test_runs_keep_the_order_and_the_limit(sizes: list[int], most: int) -> None:
    groups = list(runs_of(sizes, most))
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    totals = [sum(sizes[index] for index in group) for group in groups]
    assert all(len(g) == 1 or total <= most for g, total in zip(groups, totals, strict=True))
    for total, following in zip(totals, groups[1:], strict=False):  # as long as it can be
        assert total + sizes[following[0]] > most


def outputs_by_row(loaded: LoadedModel, batches: list[ForecastBatch]) -> dict[bytes, Tensor]:
    """Observed values of a row to what the model says of it."""
    found = {}
    for batch in batches:
        output: Any = run_teacher_forced(loaded, batch)
        predicted = output.logits if "logits" in output else output.quantile_preds
        for context, target, values in zip(batch.context, batch.target, predicted, strict=True):
            row = torch.cat([context[context.isfinite()], target[target.isfinite()]])
            steps = int(target.isfinite().sum())
            if loaded.family == "chronos-t5":  # a token a step; what follows the target is padding
                values = values[:steps]
            found[row.numpy().tobytes()] = values.detach()
    return found


def test_smaller_batches_hold_the_same_rows_and_lead_to_the_same_outputs(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    batches = calibration_batches(loaded, CALIBRATION)
    parts = small_batches(loaded, batches, steps=64)
    expected, found = outputs_by_row(loaded, batches), outputs_by_row(loaded, parts)
    assert found.keys() == expected.keys()
    for row, values in expected.items():
        torch.testing.assert_close(found[row], values, rtol=1e-4, atol=1e-4)
    config: Any = loaded.model.config
    stride = config.chronos_config.get("input_patch_stride", 1)
    alone = [part for part in parts if part.group_ids is None]
    assert all(len(p.context) == 1 or p.context.numel() <= 64 * stride for p in alone)
    if stride == 1:
        assert len(parts) > len(batches)
        assert all(part.context.isfinite().any(0)[0] for part in parts)  # nothing but padding went
    else:  # groups see each other, and a patch is one position
        grouped = [len(b.context) for b in batches if b.group_ids is not None]
        assert sorted(len(p.context) for p in parts if p.group_ids is not None) == sorted(grouped)


def test_rows_of_small_batches_side_by_side_lead_to_the_same_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = calibration_batches(load(checkpoint), CALIBRATION)

    def outputs() -> dict[bytes, Tensor]:
        model = tscompress.compress(
            load(checkpoint),
            rank=4,
            ff_ratio=0.5,
            fold=FoldConfig(precision="float32"),
            calibration=CALIBRATION,
        )
        return outputs_by_row(model, probe)

    together = outputs()
    monkeypatch.setattr(layerwise, "UNITS_AT_ONCE", 1)
    alone = outputs()
    # Rounding differs, and a fit magnifies it.
    apart = sum(float((alone[row] - values).square().sum()) for row, values in together.items())
    assert apart < 1e-4 * sum(float(values.square().sum()) for values in together.values())


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 9))
def test_streams_that_repeat_rows_are_held_once(rows: int, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, 4, generator=generator)
    batches = [table[torch.randint(rows, (2, n), generator=generator)] for n in lengths]
    held = RowTable.of(batches)
    entered = Recording(entries={"encoder": held}).entered("encoder")
    assert all(map(torch.equal, entered, batches))
    if 2 * sum(lengths) >= 2 * rows:
        assert isinstance(held, RowTable)
        assert len(held.table) <= rows


def test_streams_of_rows_of_their_own_are_held_as_they_are() -> None:
    for batches in ([torch.randn(2, 8, 4)], [torch.full((2, 8, 4), torch.nan)]):
        assert RowTable.of(batches) is batches


def test_embedded_tokens_are_held_once(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    entries = record(loaded, calibration_batches(loaded, CALIBRATION)).entries
    if loaded.family == "chronos-t5":
        assert all(isinstance(entry, RowTable) for entry in entries.values())


def test_a_recording_computes_no_more_than_it_needs(checkpoint: Path) -> None:
    """Attention of the first block of each stack, which knows the position biases."""
    loaded = load(checkpoint)
    ran: list[str] = []
    linears = {n: m for n, m in loaded.model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda *_, name=name: ran.append(name))
    batches = calibration_batches(loaded, CALIBRATION)
    recording = record(loaded, batches)
    assert all(len(calls) == len(batches) for calls in recording.arguments.values())
    inner = {name for name in ran if not name.startswith("input_patch_embedding")}
    first = [block for block in loaded.architecture.attention if ".block.0." in block.name]
    assert inner == {name for block in first for name in block.projections.values()}


def steps_of(loaded: LoadedModel, calibration: CalibrationConfig = CALIBRATION) -> dict[str, Step]:
    """The first step of each kind of attention, on the original's streams."""
    recording = record(loaded, calibration_batches(loaded, calibration))
    kinds = {sublayer_of(block): block.kind for block in loaded.architecture.attention}
    found: dict[str, Step] = {}
    for step in walk(loaded, recording, on_compressed=False, residual_targets=False):
        kind = kinds.get(sublayer_of(step.block))
        if kind is not None and kind not in found:
            found[kind] = Step(**{**vars(step), "inputs": list(step.inputs)})
    return found


@two_stacks
def test_moments_of_attention_have_rows_of_every_batch(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More calibration series are more series in the moments, of however many positions."""
    many = CALIBRATION.model_copy(update={"num_series": 384, "batch_size": 32})
    monkeypatch.setattr(fold_moments, "ROWS_PER_COLUMN", 0)  # the least: one row of each
    loaded = load(checkpoint)
    added: list[int] = []
    original = fold_moments.Products.add

    def add(products: Any, rows: Tensor, targets: Tensor | None = None) -> None:
        added.append(len(rows))
        original(products, rows, targets)

    monkeypatch.setattr(fold_moments.Products, "add", add)
    for kind, step in steps_of(loaded, many).items():
        added.clear()
        fold_moments.attention_moments(loaded, step)
        each = len(step.inputs)
        queries, keys, values = (added[start::3] for start in range(3))
        assert each >= 8
        assert values == [1] * each
        # Of group attention those count that see another series; every second batch has groups.
        assert queries == keys == ([0, 1] if kind == "group" else [1, 1]) * (each // 2)


def test_a_bolts_units_are_fitted_at_the_same_places_of_every_series(
    checkpoint: Path,
) -> None:
    """The first, the middle and the last position; those of other families are scattered."""
    loaded = load(checkpoint)
    recording = record(loaded, calibration_batches(loaded, CALIBRATION))
    steps = walk(loaded, recording, on_compressed=False, residual_targets=False)
    step = next(one for one in steps if one.positionwise)
    series, positions = 8, 9
    step.inputs = [torch.arange(series * positions).reshape(series, positions, 1)]
    step.valid = [None]
    found = [rows for rows, _ in fold_moments.chosen_rows(step, 2 * series)]
    places = set((torch.cat(found) % positions).flatten().tolist())
    assert sum(map(len, found)) == 2 * series + 1
    if loaded.family == "chronos-bolt":
        assert places == {0, 4, 8}
    else:
        assert len(places) > 4


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("vectors", [False, True])
def test_bfloat16_is_used_where_the_hardware_multiplies_in_it(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, vectors: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vectors, raising=False)
    assert multiplies_bfloat16(torch.device("cpu")) == (tiles or vectors)
    assert not multiplies_bfloat16(torch.device("meta"))


def test_unknown_hardware_precision_means_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.delattr(torch.cpu, check, raising=False)
    assert not multiplies_bfloat16(torch.device("cpu"))
