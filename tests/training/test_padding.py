"""Batches without padding: the same losses and gradients, on fewer positions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from shared_fixtures import FAMILIES
from torch import Tensor

import tscompress
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.batch import ForecastBatch
from tscompress.families.registry import adapter_of
from tscompress.training.distillation import distillation_of
from tscompress.training.padding import without_padding

PATCH = 4
CALIBRATION = CalibrationConfig(source="synthetic", num_series=16, context_length=48, batch_size=8)


def batch_of(lengths: list[int], longest: int, groups: list[int] | None = None) -> ForecastBatch:
    """Series of these lengths, at the end of contexts ``[B, longest]``."""
    torch.manual_seed(0)
    context = torch.randn(len(lengths), longest).cumsum(1)
    for row, length in zip(context, lengths, strict=True):
        row[: longest - length] = math.nan
    ids = None if groups is None else torch.tensor(groups)
    return ForecastBatch(context, torch.randn(len(lengths), PATCH), group_ids=ids)


def positions(parts: list[ForecastBatch]) -> int:
    return sum(part.context.numel() for part in parts) // PATCH


def test_parts_have_each_row_once_and_all_that_is_observed() -> None:
    batch = batch_of([400, 3, 30, 390, 8, 5, 399, 33] * 8, longest=400)
    parts = without_padding(batch, PATCH)
    assert len(parts) == 3
    assert [part.context.shape[1] for part in parts] == [8, 36, 400]
    rows = torch.cat([part.target for part in parts])
    found = {tuple(row.tolist()) for row in rows}
    assert found == {tuple(row.tolist()) for row in batch.target}
    assert len(rows) == len(batch)
    observed = sum(int(torch.isfinite(part.context).sum()) for part in parts)
    assert observed == torch.isfinite(batch.context).sum()
    assert positions(parts) < 0.5 * positions([batch])


def test_rows_of_a_group_stay_together() -> None:
    batch = batch_of([400, 3, 3, 3] * 8, 400, groups=[0, 0, 1, 1] * 8)
    short, long = without_padding(batch, PATCH)
    assert set(long.group_ids.tolist()) == {0}  # type: ignore[union-attr]
    assert (short.context.shape, long.context.shape) == ((16, 4), (16, 400))


def test_a_batch_is_cut_where_that_pays() -> None:
    one = batch_of([40, 4], longest=400)
    (part,) = without_padding(one, PATCH)  # a second part would cost more than it saves
    assert part.context.shape == (2, 40)
    assert torch.equal(part.target, one.target)
    (nothing,) = without_padding(batch_of([0, 0], longest=400), PATCH)
    assert nothing.context.shape == (2, PATCH)
    (odd,) = without_padding(batch_of([10, 10], longest=10), PATCH)  # no whole patches
    assert odd.context.shape == (2, 10)
    assert without_padding(one, None) == [one]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_whole(
    family: str, checkpoints: dict[str, Path]
) -> None:
    teacher = tscompress.load(checkpoints[family], dtype="float32")
    loaded = tscompress.load(checkpoints[family], dtype="float32")  # compress works in place
    student = tscompress.compress(loaded, rank=4, calibration=CALIBRATION)
    student.model.requires_grad_(True)
    distillation = distillation_of(teacher, student)
    steps = adapter_of(student.family).steps_per_position(student.model)
    assert steps is not None
    longest = 512 if steps == 1 else 128 * steps
    lengths = [longest, 9, longest // 2, 11] * 4
    groups = [row // 2 for row in range(16)] if family == "chronos-2" else None
    batch = batch_of(lengths, longest, groups)

    def learnt(parts: list[ForecastBatch]) -> tuple[Tensor, Tensor]:
        student.model.zero_grad()
        total = torch.zeros(2)
        for part in parts:
            losses = distillation(student.model, part).stack().sum(1)
            losses.sum().backward()
            total += losses.detach()
        grads = [p.grad.flatten() for p in student.model.parameters() if p.grad is not None]
        return total, torch.cat(grads)

    parts = without_padding(batch, steps)
    assert len(parts) > 1
    for whole, apart in zip(learnt([batch]), learnt(parts), strict=True):
        torch.testing.assert_close(apart, whole, rtol=1e-3, atol=1e-4)
