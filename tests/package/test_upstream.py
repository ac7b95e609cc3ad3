"""Compressed checkpoints in every way that chronos-forecasting forecasts and embeds.

Each test runs for a folded and a factored checkpoint of its families. That forecasts are bit-equal
to those of stock chronos without tscompress is in `test_stock`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from chronos import BaseChronosPipeline
from shared_fixtures import COMPRESSIONS, FAMILIES, made_smaller
from torch import Tensor

from tscompress.errors import UsageError
from tscompress.workflows.save import save

#: What upstream tests: seconds to years.
FREQUENCIES = ("s", "min", "30min", "h", "D", "W", "ME", "QE", "YE")
LEVELS = [0.1, 0.5, 0.9]
END = "2001-10-01"
UNIVARIATE = FAMILIES[:2]
Open = Callable[..., Any]


@pytest.fixture(scope="module", autouse=True)
def _factored_checkpoints_open() -> None:
    import_module("tscompress.pipelines")


@pytest.fixture(autouse=True)
def _same_samples() -> Iterator[None]:
    """Chronos-T5 draws paths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


@pytest.fixture(params=COMPRESSIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(compressed: dict[tuple[str, str], Path], family: str, kind: str) -> Open:
    """Opens the checkpoint with options of ``from_pretrained``."""

    def open_(**options: Any) -> Any:
        return BaseChronosPipeline.from_pretrained(compressed[family, kind], **options)

    return open_


@pytest.fixture(scope="module")
def pipelines() -> dict[tuple[str, str], Any]:
    """Those that tests opened so far; forecasts leave them as they are."""
    return {}


@pytest.fixture
def pipeline(opened: Open, pipelines: dict[tuple[str, str], Any], family: str, kind: str) -> Any:
    if (family, kind) not in pipelines:
        pipelines[family, kind] = opened()
    return pipelines[family, kind]


def of_families(*families: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families or FAMILIES)


def series(*lengths: int) -> list[Tensor]:
    """Walks around 30."""
    generator = torch.Generator().manual_seed(0)
    return [30 + torch.randn(steps, generator=generator).cumsum(0) for steps in lengths]


def call(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """From the same seed each time, with few sample paths where the pipeline draws any."""
    torch.manual_seed(3)
    draws = "ChronosPipeline" in str(method.__self__.__class__.__name__)  # type: ignore[attr-defined]
    return method(*args, **options, **({"num_samples": 5} if draws else {}))


def stacked(forecasts: Tensor | Sequence[Tensor]) -> Tensor:
    """Chronos-2 gives a list, with an axis of variates; of univariate series as others do."""
    if isinstance(forecasts, Tensor):
        return forecasts
    return torch.cat(list(forecasts))


def batch_of(contexts: Sequence[Tensor], family: str) -> Tensor:
    """A tensor of equally long series, in the shape that the family takes."""
    rows = torch.stack(list(contexts))
    return rows[:, None] if family == "chronos-2" else rows


def table(
    frequency: str, lengths: Sequence[int] = (20, 33), columns: Sequence[str] = ("target",)
) -> pd.DataFrame:
    """Series ``b``, ``a``, ... in this order, all of which end at END."""
    generator = np.random.default_rng(0)
    parts = [
        pd.DataFrame(
            {"item_id": name, "timestamp": pd.date_range(periods=steps, end=END, freq=frequency)}
            | {column: 30 + generator.normal(size=steps).cumsum() for column in columns}
        )
        for name, steps in zip("bacd", lengths, strict=False)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def ahead(past: pd.DataFrame, steps: int, frequency: str, columns: Sequence[str]) -> pd.DataFrame:
    """Values of ``columns`` at the next steps of each series."""
    ends = past.groupby("item_id", sort=False)["timestamp"].max()
    parts = [
        pd.DataFrame(
            {"item_id": name, "timestamp": pd.date_range(end, None, steps + 1, frequency)[1:]}
            | {column: np.arange(steps) / 2 for column in columns}
        )
        for name, end in ends.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


# --------------------------------------------------------------------------------------------------
# predict, predict_quantiles
# --------------------------------------------------------------------------------------------------


@of_families()
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.int64])
def test_forecasts_of_a_tensor_are_those_of_a_list(
    pipeline: Any, family: str, given: torch.dtype
) -> None:
    contexts = [one.to(given) for one in series(24, 24, 24)]
    paths = 5 if family == "chronos-t5" else len(pipeline.quantiles)
    batch = stacked(call(pipeline.predict, batch_of(contexts, family), prediction_length=7))
    assert (batch.shape, batch.dtype) == ((3, paths, 7), torch.float32)
    assert batch.isfinite().all()
    assert torch.equal(batch, stacked(call(pipeline.predict, contexts, prediction_length=7)))


@of_families()
@pytest.mark.filterwarnings("ignore:.*prediction length:UserWarning")
def test_horizons_beyond_the_models_are_forecast_or_refused(pipeline: Any, family: str) -> None:
    beyond = pipeline.model_prediction_length + 5
    with pytest.raises(ValueError):  # noqa: PT011  each family has words of its own
        call(pipeline.predict, series(24), prediction_length=beyond, limit_prediction_length=True)
    found = stacked(call(pipeline.predict, series(24), prediction_length=beyond))
    assert found.shape[-1] == beyond
    assert found.isfinite().all()


@of_families()
@pytest.mark.parametrize("levels", [LEVELS, [0.2, 0.5, 0.7, 0.8]])
def test_quantiles_are_those_of_the_forecast(
    pipeline: Any, family: str, levels: list[float]
) -> None:
    quantiles, mean = call(
        pipeline.predict_quantiles, series(24, 40), prediction_length=9, quantile_levels=levels
    )
    quantiles, mean = stacked(quantiles), stacked(mean)
    forecast = stacked(call(pipeline.predict, series(24, 40), prediction_length=9))
    assert quantiles.shape == (2, 9, len(levels))
    if family == "chronos-t5":
        expected = torch.quantile(forecast, torch.tensor(levels), dim=1).permute(1, 2, 0)
        assert torch.allclose(mean, forecast.mean(dim=1))
    else:
        known = pipeline.quantiles
        expected = torch.stack([forecast[:, known.index(level)] for level in levels], dim=-1)
        assert torch.equal(mean, forecast[:, known.index(0.5)])
    assert torch.allclose(quantiles, expected, rtol=1e-5)


@of_families()
def test_a_series_is_forecast_alone_as_in_a_batch(pipeline: Any, family: str) -> None:
    contexts = series(40, 24, 11)
    # Paths depend on what else is drawn, but for the likeliest token.
    greedy = {"top_k": 1} if family == "chronos-t5" else {}
    batch = stacked(call(pipeline.predict, contexts, prediction_length=4, **greedy))
    for row, context in zip(batch, contexts, strict=True):
        alone = stacked(call(pipeline.predict, [context], prediction_length=4, **greedy))[0]
        assert torch.allclose(row, alone, rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------------------------------
# dtypes, attention
# --------------------------------------------------------------------------------------------------


@of_families()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_dtype_forecasts(
    opened: Open, pipeline: Any, family: str, dtype: torch.dtype
) -> None:
    small = opened(dtype=dtype)
    # transformers leaves one layer of T5 in float32 where the others are in float16.
    dtypes = {parameter.dtype for parameter in small.inner_model.parameters()}
    assert dtypes - {torch.float32} == {dtype}
    greedy = {"top_k": 1} if family == "chronos-t5" else {}
    found, expected = (
        stacked(call(one.predict, series(40, 24), prediction_length=4, **greedy))
        for one in (small, pipeline)
    )
    assert found.dtype == torch.float32
    if family != "chronos-t5":  # another likeliest token is another path
        assert torch.allclose(found, expected, rtol=0.1)
    assert found.isfinite().all()


@of_families()
def test_a_model_stored_in_float16_is_compressed_and_saved(
    checkpoints: dict[str, Path], family: str, kind: str, tmp_path: Path
) -> None:
    half: Any = BaseChronosPipeline.from_pretrained(checkpoints[family], dtype=torch.float16)
    half.inner_model.save_pretrained(tmp_path / "half")
    small = save(made_smaller(tmp_path / "half", kind), tmp_path / "small")
    opened: Any = BaseChronosPipeline.from_pretrained(small)
    names = {name: one.dtype for name, one in half.inner_model.named_parameters()}
    found = {name: one.dtype for name, one in opened.inner_model.named_parameters()}
    assert torch.float16 in found.values()
    assert all(found[name] == dtype for name, dtype in names.items() if name in found)


@of_families()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_the_checkpoints_width(
    opened: Open, family: str, dtype: torch.dtype
) -> None:
    pipeline = opened(dtype=dtype)
    width = pipeline.inner_model.config.d_model
    embeddings, _ = pipeline.embed(series(33, 17))
    if family == "chronos-2":  # patches, [REG] and one of the future
        assert [one.shape for one in embeddings] == [(1, 3 + 2, width)] * 2
        alone, _ = pipeline.embed(series(33))
        assert torch.allclose(embeddings[0], alone[0], atol=1e-5 if dtype == torch.float32 else 0.1)
        return
    tokens = 33 + 1 if family == "chronos-t5" else 3 + 1  # EOS, [REG]
    assert (embeddings.shape, embeddings.dtype) == ((2, tokens, width), dtype)
    one, _ = pipeline.embed(series(33)[0])
    assert torch.allclose(
        embeddings[:1].float(), one.float(), atol=1e-5 if dtype == torch.float32 else 0.1
    )


@of_families()
def test_eager_equals_sdpa(opened: Open, family: str) -> None:
    both = [opened(attn_implementation=name) for name in ("eager", "sdpa")]
    assert [one.inner_model.config._attn_implementation for one in both] == ["eager", "sdpa"]
    greedy = {"top_k": 1} if family == "chronos-t5" else {}
    eager, sdpa = (stacked(call(one.predict, series(40, 24), 4, **greedy)) for one in both)
    assert torch.allclose(eager, sdpa, rtol=1e-4, atol=1e-5)
    eager, sdpa = (stacked(one.embed(series(40, 24))[0]) for one in both)
    assert torch.allclose(eager, sdpa, rtol=1e-4, atol=1e-5)


@of_families()
@pytest.mark.parametrize("kind", ["factored"])
def test_attention_that_a_factored_checkpoint_lacks_is_refused(opened: Open, family: str) -> None:
    with pytest.raises(UsageError, match="flash_attention_2"):
        opened(attn_implementation="flash_attention_2")
    with pytest.raises(TypeError, match="max_memory"):
        opened(max_memory={})


# --------------------------------------------------------------------------------------------------
# predict_df
# --------------------------------------------------------------------------------------------------


# How a table is read does not depend on the model: all frequencies for one of them.
@pytest.mark.parametrize(
    ("family", "kind", "frequency"),
    [
        (family, kind, frequency)
        for family in FAMILIES
        for kind in COMPRESSIONS
        for frequency in FREQUENCIES
        if (family, kind) == ("chronos-bolt", "factored") or frequency in ("D", "ME")
    ],
)
def test_a_table_of_any_frequency_is_forecast_as_its_series(
    pipeline: Any, family: str, frequency: str
) -> None:
    past = table(frequency)
    found = call(pipeline.predict_df, past, prediction_length=3, quantile_levels=LEVELS)
    assert list(found["item_id"]) == ["b"] * 3 + ["a"] * 3
    assert set(found["target_name"]) == {"target"}
    expected = ahead(past, 3, frequency, [])
    assert list(found["timestamp"]) == list(expected["timestamp"])
    contexts = [
        torch.tensor(one.to_numpy()) for _, one in past.groupby("item_id", sort=False)["target"]
    ]
    quantiles, mean = call(
        pipeline.predict_quantiles, contexts, prediction_length=3, quantile_levels=LEVELS
    )
    assert np.allclose(found["predictions"], stacked(mean).numpy().ravel())
    assert np.allclose(found[[str(level) for level in LEVELS]], stacked(quantiles).reshape(6, -1))


@of_families()
def test_a_short_series_needs_its_frequency(pipeline: Any, family: str) -> None:
    past = table("D", (2, 1))
    with pytest.raises(ValueError, match="frequency"):
        call(pipeline.predict_df, past, prediction_length=3)
    found = call(pipeline.predict_df, past, prediction_length=3, freq="D", validate_inputs=False)
    assert len(found) == 6


@of_families()
def test_tables_without_one_regular_frequency_are_refused(pipeline: Any, family: str) -> None:
    gap = table("D").drop(index=4)
    mixed = pd.concat([table("D", (9,)), table("ME", (9,)).assign(item_id="other")])
    for past in (gap, mixed):
        with pytest.raises(ValueError, match="frequency"):
            call(pipeline.predict_df, past, prediction_length=3)
    with pytest.raises(ValueError, match="target"):
        call(pipeline.predict_df, table("D").drop(columns="target"), prediction_length=3)


@of_families("chronos-2")
@pytest.mark.parametrize(
    ("frequency", "validated"), [*((one, True) for one in FREQUENCIES), (FREQUENCIES[0], False)]
)
def test_a_table_with_covariates_is_forecast_as_its_tasks(
    pipeline: Any, family: str, frequency: str, validated: bool
) -> None:
    past = table(frequency, (20, 40, 33), ("sales", "visits", "price", "weather"))
    past["weather"] = np.where(past["weather"] > 30, "sun", "rain")
    future = ahead(past, 4, frequency, ["price"])
    found = pipeline.predict_df(
        past,
        future_df=future,
        target=["sales", "visits"],
        prediction_length=4,
        quantile_levels=LEVELS,
        validate_inputs=validated,
    )
    assert list(found["target_name"]) == (["sales"] * 4 + ["visits"] * 4) * 3
    assert list(found["item_id"]) == ["b"] * 8 + ["a"] * 8 + ["c"] * 8
    tasks = [
        {
            "target": one[["sales", "visits"]].to_numpy().T,
            "past_covariates": {name: one[name].to_numpy() for name in ("price", "weather")},
            "future_covariates": {
                "price": future.loc[future["item_id"] == name, "price"].to_numpy()
            },
        }
        for name, one in past.groupby("item_id", sort=False)
    ]
    quantiles, _ = pipeline.predict_quantiles(tasks, prediction_length=4, quantile_levels=LEVELS)
    expected = torch.stack(quantiles).reshape(24, -1)
    assert np.allclose(found[[str(level) for level in LEVELS]], expected, rtol=1e-4)


def _broken_futures() -> dict[str, Callable[[pd.DataFrame], pd.DataFrame]]:
    return {
        "a series less": lambda future: future[future["item_id"] == "b"],
        "a step less": lambda future: future.iloc[:-1],
        "another frequency": lambda future: future.assign(
            timestamp=future["timestamp"]
            + pd.to_timedelta(future.groupby("item_id").cumcount(), "D")
        ),
        "the target": lambda future: future.assign(target=1.0),
        "an unknown column": lambda future: future.assign(other=1.0),
        "no timestamps": lambda future: future.drop(columns="timestamp"),
    }


@of_families("chronos-2")
@pytest.mark.parametrize("broken", _broken_futures())
def test_a_future_that_does_not_fit_is_refused(pipeline: Any, family: str, broken: str) -> None:
    past = table("h", columns=("target", "price"))
    future = _broken_futures()[broken](ahead(past, 3, "h", ["price"]))
    with pytest.raises(ValueError, match="future_df"):
        pipeline.predict_df(past, future_df=future, prediction_length=3)


@of_families("chronos-2")
@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        (torch.rand(16), "3-d"),
        ([torch.rand(1, 2, 30)], "1-d"),
        ([{"target": torch.rand(9), "extra": []}], "extra"),
        ([{"target": torch.rand(9), "past_covariates": torch.rand(9)}], "past_covariates"),
        ([{"target": torch.rand(9), "past_covariates": {"x": torch.rand(8)}}], "past_covariates"),
        (
            [
                {
                    "target": torch.rand(9),
                    "past_covariates": {"x": torch.rand(9)},
                    "future_covariates": {"y": torch.rand(3)},
                }
            ],
            "future_covariates",
        ),
        (
            [
                {
                    "target": torch.rand(9),
                    "past_covariates": {"x": torch.rand(9)},
                    "future_covariates": {"x": torch.rand(4)},
                }
            ],
            "future_covariates",
        ),
    ],
)
def test_tasks_that_do_not_fit_are_refused(
    pipeline: Any, family: str, tasks: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        pipeline.predict(tasks, prediction_length=3)


# --------------------------------------------------------------------------------------------------
# Across series, and time-outs
# --------------------------------------------------------------------------------------------------


@of_families("chronos-2")
def test_cross_learning_reads_other_series(pipeline: Any, family: str) -> None:
    contexts = series(40, 24, 33)
    apart = torch.cat(pipeline.predict(contexts, 9))
    together = torch.cat(pipeline.predict(contexts, 9, cross_learning=True))
    assert together.isfinite().all()
    assert not torch.allclose(apart, together, rtol=1e-4)
    # Alone there is nothing else to read.
    alone = [
        torch.cat(pipeline.predict(contexts[:1], 9, cross_learning=on)) for on in (False, True)
    ]
    assert torch.equal(*alone)
    frames = [
        pipeline.predict_df(table("h"), prediction_length=3, cross_learning=on)["predictions"]
        for on in (False, True)
    ]
    assert not np.allclose(*frames, rtol=1e-4)


@of_families("chronos-2")
def test_a_callback_ends_a_forecast_after_a_batch(pipeline: Any, family: str) -> None:
    done = []

    def stop() -> None:
        done.append(1)
        if len(done) == 2:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        pipeline.predict_df(
            table("h", (20,) * 4), prediction_length=3, batch_size=1, after_batch=stop
        )
    assert len(done) == 2


@of_families(*UNIVARIATE)
def test_methods_are_those_of_stock_pipelines(pipeline: Any, family: str) -> None:
    """Nothing of chronos is replaced but what would lose the structure of a factored model."""
    stock = type(pipeline)
    names = [name for name, _ in inspect.getmembers(stock, inspect.isfunction)]
    assert not set(names) & set(vars(pipeline))
