"""Series evaluated in a second, beside the loop of the official evaluation script.

    python eval/throughput.py --output eval/results/throughput --model reference/bolt

The official loop of chronos-forecasting takes the series of a dataset as they come, in batches of
32, and scores all forecasts with gluonts. It is written here from its description, in the version
that forecasts raw samples of Chronos-T5. ``tscompress.evaluate`` forecasts series of similar length
together, and scores with the same metrics and what each series contributes besides. Both run on the
same pipeline in the same process and take turns dataset by dataset, who goes first alternating;
reading the series is not timed for the official loop and is for ours. On a machine that others
use, too, CPU seconds are what to look at. The last two figures are of all datasets: with an
empty cache of scores, and again with what it then holds.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from chronos import BaseChronosPipeline, ForecastType
from gluonts.dataset.split import split
from gluonts.ev.metrics import MASE, MeanWeightedSumQuantileLoss
from gluonts.itertools import batcher
from gluonts.model.evaluation import evaluate_forecasts
from gluonts.model.forecast import Forecast, QuantileForecast, SampleForecast
from output import parser_of, write_tables
from rich.console import Console

from tscompress.checkpoints.load import load
from tscompress.data.evaluation_sets import QUANTILE_LEVELS, EvaluationDataset
from tscompress.data.suites import load_suite
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.score_cache import ScoreCache

_BATCH_SIZE = 32
OFFICIAL, OURS, AUTOMATIC = "official loop", "tscompress", "tscompress, batch size auto"


def official(pipeline: BaseChronosPipeline, dataset: EvaluationDataset) -> dict[str, float]:
    """MASE and WQL of one dataset by the official loop."""
    _, template = split(dataset.entries(), offset=-dataset.horizon)
    test_data = template.generate_instances(dataset.horizon)
    outputs = []
    for batch in batcher(test_data.input, batch_size=_BATCH_SIZE):
        context = [torch.tensor(entry["target"], dtype=torch.float32) for entry in batch]
        outputs.append(_predict(pipeline, context, dataset.horizon))
    forecasts = [
        _as_forecast(pipeline, values, entry["start"] + len(entry["target"]))
        for values, entry in zip(np.concatenate(outputs), test_data.input, strict=True)
    ]
    with contextlib.redirect_stderr(io.StringIO()):  # a bar that cannot be switched off
        scores = evaluate_forecasts(
            forecasts,
            test_data=test_data,
            metrics=[MASE(), MeanWeightedSumQuantileLoss(QUANTILE_LEVELS)],
            batch_size=5000,
        ).iloc[0]
    return {"MASE": scores["MASE[0.5]"], "WQL": scores["mean_weighted_sum_quantile_loss"]}


def _predict(pipeline: BaseChronosPipeline, context: list[torch.Tensor], horizon: int) -> Any:
    """Samples or quantiles, ``[B, samples or 9, horizon]``."""
    if pipeline.forecast_type == ForecastType.SAMPLES:
        return pipeline.predict(context, prediction_length=horizon).numpy()
    quantiles, _ = pipeline.predict_quantiles(
        context, prediction_length=horizon, quantile_levels=QUANTILE_LEVELS
    )
    stacked = torch.cat(quantiles) if isinstance(quantiles, list) else quantiles
    return stacked.numpy().swapaxes(1, 2)


def _as_forecast(pipeline: BaseChronosPipeline, values: Any, start: pd.Period) -> Forecast:
    if pipeline.forecast_type == ForecastType.SAMPLES:
        return SampleForecast(samples=values, start_date=start)
    keys = [str(level) for level in QUANTILE_LEVELS]
    return QuantileForecast(forecast_arrays=values, start_date=start, forecast_keys=keys)


def measure(
    pipeline: BaseChronosPipeline,
    max_series: int | None,
    datasets: list[str] | None,
    rounds: int,
    console: Console,
) -> pd.DataFrame:
    """A row for each dataset, way and round: series, seconds, scores."""

    def ours(batch_size: Any) -> Callable[[EvaluationDataset], dict[str, float]]:
        def run(dataset: EvaluationDataset) -> dict[str, float]:
            options: dict[str, Any] = {"max_series": max_series, "datasets": [dataset.name]}
            (row,) = evaluate_pipeline(pipeline, name="m", batch_size=batch_size, **options).rows
            return {"MASE": row.MASE, "WQL": row.WQL}

        return run

    ways = {OFFICIAL: lambda d: official(pipeline, d), OURS: ours(32), AUTOMATIC: ours("auto")}
    rows = []
    for number in range(rounds):
        for place, dataset in enumerate(load_suite("offline", max_series, datasets)):
            first = (number + place) % len(ways)
            for way in [*ways][first:] + [*ways][:first]:
                started, cpu_started = time.perf_counter(), time.process_time()
                scores = ways[way](dataset)
                seconds = time.perf_counter() - started
                cpu_seconds = time.process_time() - cpu_started
                rows.append(
                    {"dataset": dataset.name, "way": way, "round": number,
                     "series": len(dataset.series), "seconds": seconds,
                     "CPU seconds": cpu_seconds, **scores}
                )  # fmt: skip
                console.print(f"{dataset.name} {way}: {len(dataset.series) / seconds:.1f} series/s")
    return pd.DataFrame(rows)


def cold_and_cached(
    pipeline: BaseChronosPipeline, max_series: int | None, datasets: list[str] | None
) -> tuple[float, float]:
    """Seconds of the whole suite with an empty cache, and with a full one."""
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(2):
            started = time.perf_counter()
            cache = ScoreCache(directory)
            evaluate_pipeline(
                pipeline, name="m", max_series=max_series, datasets=datasets, cache=cache
            )
            seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


def markdown(frame: pd.DataFrame, cold: float, cached: float, title: str) -> str:
    """Medians over the rounds, and the whole suite."""
    # How long a dataset takes is the median of its rounds.
    kinds = ["seconds", "CPU seconds"]
    typical = frame.groupby(["dataset", "way"], sort=False)[["series", *kinds]].median()
    total = typical.groupby("way", sort=False).sum().reindex([OFFICIAL, OURS, AUTOMATIC])
    lines = [
        title,
        "",
        "| | series/s | ratio | series per CPU second | ratio | seconds |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for way in total.index:
        cells = []
        for kind in kinds:
            speed = total["series"] / total[kind]
            cells += [f"{speed[way]:.1f}", f"{speed[way] / speed[OFFICIAL]:.2f}"]
        lines.append(f"| {way} | {' | '.join(cells)} | {total['seconds'][way]:.1f} |")
    lines += [f"| tscompress, all of it, empty cache | | | | | {cold:.1f} |",
              f"| tscompress, all of it again | | | | | {cached:.2f} |"]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, ".csv and .md", max_series=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", action="append", help="only this one; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    console = Console()
    loaded = load(options.model, dtype="float32")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="We recommend keeping prediction length")
        frame = measure(
            loaded.forecaster, options.max_series, options.dataset, options.rounds, console
        )
        cold, cached = cold_and_cached(loaded.forecaster, options.max_series, options.dataset)
    series = frame.drop_duplicates("dataset")["series"]
    title = (
        f"**{options.model}**, {series.sum()} series of {len(series)} datasets, float32, "
        f"{torch.get_num_threads()} thread(s), batch {_BATCH_SIZE}, median of {options.rounds}"
    )
    text = markdown(frame, cold, cached, title)
    stem = f"{options.output}-{options.model.rsplit('/', 1)[-1]}"
    write_tables(stem, frame, text)
    console.print(text, markup=False)


if __name__ == "__main__":
    main()
