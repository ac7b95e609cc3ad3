"""Estimate the memory of a compression from config and headers, before weights are read.

Everything is in float32: while loading, weights and the pages of the mapped files; then weights and
the method's working memory; at last the result twice, in memory and loaded back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import psutil
import torch

from tscompress.benchmark.sizes import kv_cache_bytes
from tscompress.benchmark.workload import Workload
from tscompress.budget.window_loss import HOLD_OUT
from tscompress.checkpoints.config_checks import check_config
from tscompress.checkpoints.format import base_config_of
from tscompress.checkpoints.load import Checkpoint, family_name
from tscompress.families.registry import FORECAST_FAMILIES, adapter_of
from tscompress.plan.schedules import PlannedSchedule
from tscompress.workflows.recipe import Recipe

_PROJECTION = re.compile(r"\.[qkvo]\.weight$")
_FEED_FORWARD = re.compile(r"\.w[io]\.weight$")
#: Residual streams of the original and of the partly changed model, and the encoder's output.
_STREAMS = 3


def compression_memory_bytes(checkpoint: Checkpoint, recipe: Recipe) -> dict[str, int]:
    """Peak memory of a compression in bytes, by part; the sum is the estimate.

    ``process``: the interpreter and the libraries, as measured now. ``weights``: those of the model
    in float32, with ``recover`` also the original's, with ``layers`` or a budget in latency or WQL,
    or one that may narrow the stream, those of measured candidates, and with a width beside a
    budget those of the narrower model.
    ``work``: the largest working memory; with a budget in latency also the cache of a timed
    forecast, where that is more. For a recovery see
    :func:`tscompress.training.recovery_memory.memory_bytes`.

    Raises
    ------
    CorruptCheckpointError, UnsupportedModelError
        The config is not that of a supported model.
    """
    weights = 4 * checkpoint.parameters
    method_bytes = _stream_bytes if recipe.method == "fold" else _factor_bytes
    copies = 1 + (recipe.recover is not None) + (recipe.layers is not None)
    if isinstance(recipe.schedule, PlannedSchedule):
        width, schedule = recipe.width, recipe.schedule
        copies += schedule.budget.is_measured or (schedule.may_narrow and width is None)
        copies += width not in (None, 1.0)  # 1.0 is all of it
    return {
        "process": int(psutil.Process().memory_info().rss),
        "weights": weights * copies,
        "work": max(
            checkpoint.bytes_on_disk,
            method_bytes(checkpoint, recipe),
            _cache_bytes(checkpoint, recipe),
        ),
    }


def _cache_bytes(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """What the original caches in a forecast that a budget in latency times, in float32."""
    schedule, config = recipe.schedule, checkpoint.config
    timed = isinstance(schedule, PlannedSchedule) and schedule.budget.measure == "latency"
    if not timed or checkpoint.is_factored:
        return 0
    name = family_name(config, checkpoint.source)
    settings = config.get("chronos_config")
    if name not in FORECAST_FAMILIES or not isinstance(settings, Mapping):
        return 0
    workload = recipe.bench or Workload()
    longest = {"context_length": "context_length", "horizon": "prediction_length"}
    shorter = {
        field: min(getattr(workload, field), int(settings.get(key, 1)))
        for field, key in longest.items()
    }
    model = adapter_of(name).empty_model(config)
    return kv_cache_bytes(model, workload.model_copy(update=shorter), dtype=torch.float32)


def _factor_bytes(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """Bytes of factors, which are only made if they are smaller than the original weights."""
    planned = [_PROJECTION, *([_FEED_FORWARD] if recipe.feed_forward else [])]
    matrices = [
        tensor.shape
        for name, tensor in checkpoint.stored.items()
        if len(tensor.shape) == 2 and any(pattern.search(name) for pattern in planned)
    ]
    factors = sum(4 * rows * columns for rows, columns in matrices)
    if recipe.method == "svd":
        return factors
    return factors + sum(8 * columns**2 for _, columns in matrices)  # moments of the inputs


def _stream_bytes(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """The residual streams of all calibration series, which are carried from layer to layer, and
    with a budget the forecasts that cuts of a Chronos-T5 are compared with."""
    if not recipe.calibrates:
        return 0
    config = base_config_of(checkpoint.config) if checkpoint.is_factored else checkpoint.config
    settings = config.get("chronos_config")
    if not isinstance(settings, Mapping):
        return 0  # a family only for profiling, or a config that loading refuses
    check_config(config, checkpoint.source, len(checkpoint.stored))
    family = adapter_of(family_name(config, checkpoint.source))
    patch = int(settings.get("input_patch_stride", 1))
    longest = min(recipe.calibration.context_length, int(settings.get("context_length", 0)))
    series = recipe.calibration.num_series or family.defaults.calibration_windows
    tokens = family.draws_samples
    ahead = int(settings.get("prediction_length", 0)) if tokens else 1
    positions = series * (longest // patch + 1 + ahead)
    streams = _STREAMS * 4 * positions * int(config.get("d_model", 0))
    if not (tokens and isinstance(recipe.schedule, PlannedSchedule)):
        return streams
    # What cuts are compared with: a probability of each token at each held-out step. The loss of a
    # single cut is measured on fewer of them, that of the last candidates on all.
    return streams + 4 * (series // HOLD_OUT) * ahead * int(config.get("vocab_size", 0))
