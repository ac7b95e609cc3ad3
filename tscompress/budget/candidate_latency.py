"""How long a candidate takes beside the original."""

from __future__ import annotations

import torch
from torch import nn

from tscompress.benchmark.bench import bench
from tscompress.benchmark.workload import Workload
from tscompress.budget.candidates import Candidate
from tscompress.checkpoints.format import apply_structure_
from tscompress.checkpoints.load import LoadedModel
from tscompress.compression.apply import config_of_layers
from tscompress.compression.fold_plans import fold_plan
from tscompress.compression.residual_stream import sliced_config
from tscompress.families.registry import build_empty, describe, wrap_pipeline
from tscompress.families.t5_stack import tie_weights_


def latency_of(
    loaded: LoadedModel, candidate: Candidate, workload: Workload, *, repeats: int = 5
) -> float:
    """Latency of the candidate / latency of the original, timed in turn ``repeats`` times.

    Latency does not depend on the values of weights, so the candidate has random ones. ``loaded``
    is left unchanged.

    Raises
    ------
    UsageError
        The model is on another device than the workload's, or the workload does not fit it.
    PlanError
        The model has no parts with these names and sizes.
    """
    dtype = next(loaded.model.parameters()).dtype
    device = next(loaded.model.parameters()).device
    model = _empty_model(loaded, candidate)
    fill_randomly_(model, dtype, device)
    pipeline = wrap_pipeline(loaded.family, model.to(device).eval())
    few = workload.model_copy(update={"repeats": repeats, "warmup": 1})
    models = {"original": loaded.forecaster, "candidate": pipeline}
    return bench(models, few, measure_macs=False).ratios("candidate")["latency_ms"]


def fill_randomly_(model: nn.Module, dtype: torch.dtype, device: str | torch.device) -> None:
    """Give a model on the meta device random weights, for timing."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        weight = torch.empty(parameter.shape, dtype=dtype, device=device)
        parent, _, child = name.rpartition(".")
        filled = nn.Parameter(weight.uniform_(-0.05, 0.05, generator=generator), False)
        setattr(model.get_submodule(parent), child, filled)
    tie_weights_(model)


def _empty_model(loaded: LoadedModel, candidate: Candidate) -> nn.Module:
    """A model with the candidate's sizes on the meta device."""
    config = config_of_layers(loaded, candidate.kept_layers or {})
    if candidate.width is not None:
        config = sliced_config(loaded.family, config, candidate.width)
    qk, vo, hidden = candidate.qk, candidate.vo, candidate.hidden
    if isinstance(qk, int) and qk == vo and isinstance(hidden, int):
        return build_empty(loaded.family, config | {"d_kv": qk, "d_ff": hidden})
    model = build_empty(loaded.family, config)
    architecture = describe(loaded.family, model)
    # Any rotary frequencies take the same time.
    plan = fold_plan(
        model,
        architecture,
        qk=qk,
        vo=vo,
        hidden=hidden,
        embedding=candidate.embedding,
        free_frequencies=True,
    )
    apply_structure_(model, plan)
    return model
