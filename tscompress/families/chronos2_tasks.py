"""Tasks of the stock Chronos-2 pipeline: categories as numbers, covariates by name, cross-learning.

What differs between versions of chronos-forecasting is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tscompress.families.covariates import Covariates, Joint, JointSeries

#: Since chronos-forecasting 2.3; before, each task was encoded by itself.
_ENCODES_TOGETHER = find_spec("chronos.chronos2.preprocess") is not None


def encoded(tasks: Sequence[JointSeries], horizon: int) -> list[Joint]:
    """Tasks as the stock pipeline encodes them: the mean of the target by category where there is
    one target, and the place of the category where there are several.
    """
    given = [_as_stock(task) for task in tasks]
    if _ENCODES_TOGETHER:
        from chronos.chronos2.preprocess import from_list_of_dicts

        prepared = [
            (one["context"], one["future_covariates"], one["n_targets"], one["n_future_covariates"])
            for one in from_list_of_dicts(given, prediction_length=horizon)
        ]
    else:
        from chronos.chronos2.dataset import validate_and_prepare_single_dict_task

        each = [validate_and_prepare_single_dict_task(one, 0, horizon) for one in given]
        prepared = [
            (context, future, targets, known) for context, future, targets, _, known in each
        ]
    return [_joint(*one) for one in prepared]


def _as_stock(task: JointSeries) -> dict[str, Any]:
    beside = task.covariates
    return {
        "target": np.stack([np.asarray(values, np.float32) for values in task.targets]),
        "past_covariates": dict(beside.past),
        "future_covariates": dict(beside.future),
    }


def _joint(context: Tensor, future: Tensor, targets: int, known: int) -> Joint:
    """From rows of targets, past covariates and known ones, as chronos orders them."""
    first_known = len(context) - known
    past = torch.cat([context[first_known:], context[targets:first_known]])
    return Joint(context[:targets], Covariates(past, future[first_known:]))


def stock_task(targets: Tensor, covariates: Covariates) -> dict[str, Any]:
    """A task of numbers as ``predict`` takes it, covariates by name.

    Parameters
    ----------
    targets
        ``[R, T]``; of one, the task has the series ``[T]``.
    """
    past = {f"covariate-{index}": row for index, row in enumerate(covariates.past)}
    future = dict(zip(past, covariates.future, strict=False))  # of the first
    target = targets[0] if len(targets) == 1 else targets
    return {"target": target, "past_covariates": past, "future_covariates": future}


def cross_learning_option(pipeline: Any) -> dict[str, bool]:
    """The option of ``predict`` by which all series of a batch see one another."""
    known = inspect.signature(pipeline.predict).parameters
    return {"cross_learning" if "cross_learning" in known else "predict_batches_jointly": True}
