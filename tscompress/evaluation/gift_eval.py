"""Scores in the layout of GIFT-Eval's results: ``all_results.csv`` and ``config.json``.

Only the layout: the benchmark has 98 configurations with its own datasets and windows. The metrics
are gluonts', as there; unmeasured ones are empty.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tscompress._version import __version__
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.evaluation.metrics import MEDIAN, Quantiles, backtest
from tscompress.evaluation.results import SEASONAL_NAIVE, EvaluationResult
from tscompress.io.files import write_text_atomically
from tscompress.io.own_outputs import table_csv
from tscompress.io.quiet import without_bars

with warnings.catch_warnings():
    # gluonts recommends faster JSON libraries on import; nothing here is slowed down by JSON.
    warnings.filterwarnings("ignore", message="Using `json`-module")
    from gluonts.ev.metrics import (
        MAE,
        MAPE,
        MASE,
        MSE,
        MSIS,
        ND,
        NRMSE,
        RMSE,
        SMAPE,
        MeanWeightedSumQuantileLoss,
    )
    from gluonts.model.evaluation import evaluate_forecasts
    from gluonts.model.forecast import QuantileForecast

RESULTS_FILE = "all_results.csv"
CONFIG_FILE = "config.json"

_METRICS = {
    "MSE[mean]": MSE(),
    "MSE[0.5]": MSE("0.5"),
    "MAE[0.5]": MAE(),
    "MASE[0.5]": MASE(),
    "MAPE[0.5]": MAPE(),
    "sMAPE[0.5]": SMAPE(),
    "MSIS": MSIS(),
    "RMSE[mean]": RMSE(),
    "NRMSE[mean]": NRMSE(),
    "ND[0.5]": ND(),
    "mean_weighted_sum_quantile_loss": MeanWeightedSumQuantileLoss(QUANTILE_LEVELS),
}
#: For sample paths these need more than the quantiles 0.1 … 0.9.
_NOT_OF_SAMPLES = ("MSE[mean]", "MSIS", "RMSE[mean]", "NRMSE[mean]")
COLUMNS = (
    "dataset", "model", *(f"eval_metrics/{name}" for name in _METRICS), "domain", "num_variates",
)  # fmt: skip


class GiftEvalResults:
    """Collects the forecasts of an evaluation; pass an instance as ``on_forecasts``."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def __call__(self, dataset: EvaluationDataset, quantiles: Quantiles) -> None:
        """Score the quantiles ``[N, 9, horizon]`` of a dataset."""
        scores = _scores(dataset, quantiles)
        self._rows.append(
            {
                "dataset": f"{dataset.name}/{_frequency(dataset.freq)}/short",
                **{f"eval_metrics/{name}": value for name, value in scores.items()},
                "num_variates": 1,
            }
        )

    def frame(self, result: EvaluationResult) -> pd.DataFrame:
        """The 15 columns, sorted by dataset; ``domain`` is not known and empty.

        Parameters
        ----------
        result
            Of the same evaluation. If the model samples paths, metrics that need more than their
            quantiles 0.1 … 0.9 are empty. For quantile models the median is taken as the mean, and
            gluonts extrapolates the tails for MSIS.
        """
        frame = pd.DataFrame(self._rows).reindex(columns=list(COLUMNS))
        frame["model"] = result.model
        if result.sampling is not None:
            frame[[f"eval_metrics/{name}" for name in _NOT_OF_SAMPLES]] = np.nan
        return frame.sort_values("dataset", ignore_index=True)

    def save(self, directory: Path, result: EvaluationResult, dtype: str) -> None:
        """Write both files; each is replaced in one step or not at all.

        Parameters
        ----------
        directory
            An existing directory.
        result
            See :meth:`frame`.
        dtype
            Of the weights, for the config.

        Raises
        ------
        OutputError
            A file cannot be written.
        """
        kind = "statistical" if result.model == SEASONAL_NAIVE else "pretrained"
        config = {
            "model": result.model,
            "model_type": kind,
            "model_dtype": dtype,
            "written_by_tscompress": __version__,
        }
        content = table_csv(self.frame(result))
        write_text_atomically(directory / RESULTS_FILE, content)
        write_text_atomically(directory / CONFIG_FILE, json.dumps(config, indent=4) + "\n")


def _scores(dataset: EvaluationDataset, quantiles: Quantiles) -> dict[str, float]:
    median = quantiles[:, MEDIAN, None]
    arrays = np.concatenate([quantiles, median], axis=1).astype(np.float64)  # [N, 10, H]
    keys = [*map(str, QUANTILE_LEVELS), "mean"]
    ends = zip(dataset.starts, dataset.contexts, strict=True)
    forecasts = [
        QuantileForecast(rows, start + len(context), keys)
        for rows, (start, context) in zip(arrays, ends, strict=True)
    ]
    with without_bars(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # labels of zero have no percentage
        found = evaluate_forecasts(
            forecasts,
            test_data=backtest(dataset),
            metrics=list(_METRICS.values()),
            seasonality=dataset.seasonality,
            batch_size=5000,
        ).iloc[0]
    return {name: float(found[name]) for name in _METRICS}


def _frequency(freq: str) -> str:
    """The frequency in GIFT-Eval's notation: ``H``, ``15T``, ``W``, ``M``, ``Q``, ``A``."""
    match = re.fullmatch(r"(\d*)([A-Za-z]+)(?:-\w+)?", freq)
    assert match is not None
    names = {"h": "H", "min": "T", "s": "S", "ME": "M", "QE": "Q", "YE": "A", "Y": "A"}
    return match[1] + names.get(match[2], match[2])
