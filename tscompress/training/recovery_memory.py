"""About how much memory a recovery takes."""

from __future__ import annotations

from typing import Any

import psutil
from torch import nn

from tscompress.checkpoints.load import LoadedModel
from tscompress.training.recovery_config import RecoveryConfig
from tscompress.training.windows import Bucket


def memory_bytes(
    student: LoadedModel, teacher: LoadedModel, config: RecoveryConfig, processes: int = 1
) -> dict[str, int]:
    """Estimated memory of a run in each process: weights exactly, activations roughly.

    ``process`` is the present memory of interpreter, libraries and both models. The student's
    weights count five times in float32 (master, gradient, at most two moments, best so far), the
    teacher's once. Activations are those of the largest batch, forecasts the teacher's of the
    held-out series.
    """
    config = config.resolved(student, teacher)
    counts = [sum(p.numel() for p in loaded.model.parameters()) for loaded in (student, teacher)]
    parts = processes * config.accumulate
    activations = max(
        _activation_bytes(student.model, bucket, config) // parts for bucket in config.buckets or ()
    )
    return {
        "process": int(psutil.Process().memory_info().rss),
        "student": 20 * counts[0],
        "teacher": 4 * counts[1],
        "activations": activations,
        "forecasts": _forecast_bytes(teacher.model, config) // processes,
    }


def _forecast_bytes(model: nn.Module, config: RecoveryConfig) -> int:
    """Of held-out series, at most."""
    settings: Any = model.config
    chronos = dict(settings.chronos_config)
    values = int(chronos.get("n_tokens") or len(chronos["quantiles"]))
    horizon = max(bucket.horizon for bucket in config.buckets or ())
    size = 2 if config.precision == "bf16" else 4
    return size * (config.held_out_series or 0) * horizon * values


def _activation_bytes(model: nn.Module, bucket: Bucket, config: RecoveryConfig) -> int:
    settings: Any = model.config
    chronos = dict(settings.chronos_config)
    patch = chronos.get("input_patch_size", 1)
    positions = bucket.context_length // patch + 1
    width = settings.num_heads * settings.d_kv
    values = 8 * settings.d_model + 4 * width + 2 * settings.d_ff
    scores = 2 * settings.num_heads * positions
    layers = settings.num_layers
    per_position = 2 * (values + scores) * (1 if config.gradient_checkpointing else layers)
    if config.gradient_checkpointing:
        per_position += 4 * settings.d_model * layers
    total = bucket.batch_size * positions * per_position
    if chronos.get("n_tokens"):  # logits of both models, and their logarithms
        total += 6 * 4 * bucket.batch_size * bucket.horizon * int(chronos["n_tokens"])
        total += bucket.batch_size * bucket.horizon * per_position
    return int(total)
