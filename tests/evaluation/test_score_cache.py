"""The cache of scores: found where nothing changed, missed where anything did, never trusted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tscompress.checkpoints import digests
from tscompress.checkpoints.digests import model_digest
from tscompress.checkpoints.load import LoadedModel, load
from tscompress.cli import app as cli
from tscompress.data.evaluation_sets import EvaluationDataset
from tscompress.evaluation import evaluate as evaluation
from tscompress.evaluation.evaluate import evaluate_pipeline
from tscompress.evaluation.forecasting import SeasonalNaive
from tscompress.evaluation.metrics import Quantiles
from tscompress.evaluation.results import DatasetScore, EvaluationResult
from tscompress.evaluation.score_cache import ScoreCache
from tscompress.evaluation.tables import evaluation_table


def toy(name: str = "toy", count: int = 3, freq: str = "M") -> EvaluationDataset:
    rng = np.random.default_rng(len(name))
    series = tuple(rng.normal(size=30 + index).cumsum() + 40 for index in range(count))
    return EvaluationDataset(name, 4, series, (pd.Period("2000-01-01", freq=freq),) * count)


class Bench:
    """Evaluates a tiny model on toy datasets, and knows how often it forecast."""

    def __init__(self, checkpoint: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: LoadedModel = load(checkpoint, dtype="float32")
        self.datasets = [toy()]
        self.directory = directory
        self.forecasts = 0
        self.options: dict[str, Any] = {"name": "tiny"}
        real = evaluation.predict

        def counted(*arguments: Any, **options: Any) -> Any:
            self.forecasts += 1
            return real(*arguments, **options)

        monkeypatch.setattr(evaluation, "predict", counted)
        monkeypatch.setattr(evaluation, "load_suite", lambda *_, **__: iter(self.datasets))

    def run(self, **options: Any) -> EvaluationResult:
        cache = ScoreCache(self.directory)
        settings = {"cache": cache, **self.options, **options}
        return evaluate_pipeline(self.loaded.forecaster, "offline", **settings)

    def forecasts_of(self, **options: Any) -> int:
        before = self.forecasts
        self.run(**options)
        return self.forecasts - before

    @property
    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.json"))


@pytest.fixture
def t5(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    found = Bench(checkpoints["chronos-t5"], tmp_path / "scores", monkeypatch)
    found.options["num_samples"] = 3
    return found


@pytest.fixture
def bolt(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(checkpoints["chronos-bolt"], tmp_path / "scores", monkeypatch)


def without_time(result: EvaluationResult) -> list[DatasetScore]:
    return [row.model_copy(update={"seconds": 0.0, "cached": None}) for row in result.rows]


# --- hits -----------------------------------------------------------------------------------------


def test_scores_are_found_again(t5: Bench) -> None:
    first = t5.run()
    again = t5.run()
    assert t5.forecasts == 1
    assert first.rows[0].cached is None
    assert again.rows[0].cached is True
    assert again.rows[0].seconds == first.rows[0].seconds
    assert without_time(again) == without_time(first)
    assert again.sampling == first.sampling is not None
    assert EvaluationResult.from_dict(json.loads(json.dumps(again.to_dict()))) == again


def test_table_counts_cached_datasets(bolt: Bench) -> None:
    def shown(result: EvaluationResult) -> str:
        console = Console(file=StringIO(), width=120)
        console.print(evaluation_table(result))
        return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    assert "earlier run" not in shown(bolt.run())
    bolt.datasets = [toy(), toy("other")]
    assert "1 of 2 datasets from an earlier run" in shown(bolt.run())


def test_a_model_is_known_by_its_content(
    bolt: Bench, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    bolt.run()
    shutil.copytree(checkpoints["chronos-bolt"], tmp_path / "moved")
    bolt.loaded = load(tmp_path / "moved", dtype="float32")
    (row,) = bolt.run(name="renamed").rows
    assert bolt.forecasts == 1
    assert (row.model, row.cached) == ("renamed", True)


def test_irrelevant_settings_keep_the_key(bolt: Bench, t5: Bench) -> None:
    bolt.run(seed=0)
    assert bolt.forecasts_of(seeds=(7, 8)) == 0  # it draws nothing
    t5.run()
    assert t5.forecasts_of(batch_size="auto") == 0  # it draws in batches of 32 then


def test_seasonal_naive_is_kept_too(bolt: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> EvaluationResult:
        cache = ScoreCache(bolt.directory)
        return evaluate_pipeline("seasonal-naive", "offline", name="naive", cache=cache)

    first = run()
    monkeypatch.setattr(SeasonalNaive, "forecast", None)
    assert without_time(run()) == without_time(first)


# --- misses ---------------------------------------------------------------------------------------


def one_bit(bench: Bench) -> None:
    weight = next(bench.loaded.model.parameters())
    weight.data.view(torch.int32).view(-1)[0] ^= 1


def other_dtype(bench: Bench) -> None:
    bench.loaded = load(bench.loaded.directory, dtype="bfloat16")


def other_buffer(bench: Bench) -> None:
    bench.loaded.model.register_buffer("scale", torch.ones(1))


def attribute(name: str, value: object) -> Callable[[Bench], None]:
    def change(bench: Bench) -> None:
        attention: Any = bench.loaded.model.get_submodule("encoder.block.0.layer.0.SelfAttention")
        assert getattr(attention, name) != value
        setattr(attention, name, value)

    return change


def temperature(bench: Bench) -> None:
    bench.loaded.forecaster.model.config.temperature = 0.5


def config_value(bench: Bench) -> None:
    bench.loaded.model.config.layer_norm_epsilon *= 2  # type: ignore[union-attr, operator]


def dataset(**changes: Any) -> Callable[[Bench], None]:
    def change(bench: Bench) -> None:
        bench.datasets = [dataclasses.replace(one, **changes) for one in bench.datasets]

    return change


def last_bit_of_a_value(bench: Bench) -> None:
    (one,) = bench.datasets
    values = one.series[1].copy()
    values[5] = np.nextafter(values[5], np.inf)
    series = (one.series[0], values, one.series[2])
    bench.datasets = [dataclasses.replace(one, series=series)]


def fewer_series(bench: Bench) -> None:
    (one,) = bench.datasets
    bench.datasets = [dataclasses.replace(one, series=one.series[:2], starts=one.starts[:2])]


CHANGES: dict[str, Callable[[Bench], None]] = {
    "one bit of a weight": one_bit,
    "dtype": other_dtype,
    "buffers": other_buffer,
    "heads": attribute("n_heads", 2),
    "a switch": attribute("is_decoder", True),
    "temperature": temperature,
    "config": config_value,
    "a value": last_bit_of_a_value,
    "the series": fewer_series,
    "horizon": dataset(horizon=3),
    "name": dataset(name="toys"),  # the random numbers come from it
    "starts": dataset(starts=(pd.Period("2001-01-01", freq="M"),) * 3),
    "frequency": dataset(starts=(pd.Period("2000-01-01", freq="Q"),) * 3),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_model_or_data_is_missed(t5: Bench, what: str) -> None:
    t5.run()
    assert t5.forecasts_of() == 0
    CHANGES[what](t5)
    assert t5.forecasts_of() == 1
    assert len(t5.files) == 2
    assert t5.forecasts_of() == 0


@pytest.mark.parametrize(
    ("options", "forecasts"),
    [({"seed": 1}, 1), ({"seeds": (0, 1)}, 2), ({"num_samples": 4}, 1), ({"batch_size": 2}, 1)],
    ids=str,
)
def test_a_change_of_protocol_is_missed(t5: Bench, options: dict[str, Any], forecasts: int) -> None:
    t5.run()
    assert t5.forecasts_of(**options) == forecasts
    assert t5.forecasts_of(**options) == 0


def test_another_season_is_missed(t5: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    t5.run()
    monkeypatch.setattr(EvaluationDataset, "seasonality", property(lambda _: 5))
    assert t5.forecasts_of() == 1


def test_other_levels_are_missed(bolt: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bolt.run()
    monkeypatch.setattr(evaluation, "QUANTILE_LEVELS", [0.1, 0.5, 0.9])
    assert bolt.forecasts_of() == 1


@pytest.mark.parametrize("library", ["tscompress", *digests.LIBRARIES])
def test_other_versions_are_missed(
    bolt: Bench, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    bolt.run()
    real = digests.importlib.metadata.version
    monkeypatch.setattr(
        digests.importlib.metadata,
        "version",
        lambda name: "0.0.1" if name == library else real(name),
    )
    if library == "tscompress":
        monkeypatch.setattr(digests, "__version__", "0.0.1")
    assert bolt.forecasts_of() == 1


def test_other_code_is_missed(bolt: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bolt.run()
    package = tmp_path / "package"
    shutil.copytree(digests.PACKAGE, package, ignore=lambda *_: {"reference"})
    monkeypatch.setattr(digests, "PACKAGE", package)
    assert bolt.forecasts_of() == 0
    changed = tmp_path / "changed"
    package.rename(changed)
    with (changed / "evaluation" / "evaluate.py").open("a") as stream:
        stream.write("# another metric\n")
    monkeypatch.setattr(digests, "PACKAGE", changed)
    assert bolt.forecasts_of() == 1


def test_other_hardware_is_missed(bolt: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bolt.run()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert bolt.forecasts_of() == 1


def test_every_field_of_a_dataset_counts() -> None:
    @dataclasses.dataclass(frozen=True)
    class Extended(EvaluationDataset):
        """As another version might have it."""

        weights: tuple[np.ndarray, ...] = ()

    def digest(last: float) -> str:
        weights = (np.zeros(5000), np.array([last]))
        known = {f.name: getattr(toy(), f.name) for f in dataclasses.fields(toy())}
        return digests.dataset_digest(Extended(**known, weights=weights))

    assert digest(0.0) == digest(0.0) != digest(1.0)


def test_digests_of_models_do_not_depend_on_the_process(checkpoint: Path) -> None:
    first, second = (model_digest(load(checkpoint).forecaster) for _ in range(2))
    assert first == second != model_digest("seasonal-naive")


def test_packed_weights_count(checkpoint: Path) -> None:
    """Quantized layers may hold theirs as no parameter and no buffer."""

    class Packed(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self._value = value

        def get_extra_state(self) -> Any:
            return torch.int8, (torch.full((2, 2), self._value), None)

    def digest(value: float) -> str:
        pipeline = load(checkpoint).forecaster
        pipeline.inner_model.add_module("packed", Packed(value))
        return model_digest(pipeline)

    assert digest(1) == digest(1) != digest(2)


# --- interruptions --------------------------------------------------------------------------------


def test_interrupted_run_resumes(t5: Bench, tmp_path: Path) -> None:
    t5.datasets = [toy(name) for name in ("a", "bb", "ccc")]

    def stop(row: DatasetScore) -> None:
        if row.dataset == "bb":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        t5.run(on_dataset=stop)
    assert t5.forecasts == 2
    seen: list[str] = []
    resumed = t5.run(on_dataset=lambda row: seen.append(row.dataset))
    assert t5.forecasts == 3
    assert seen == ["a", "bb", "ccc"]
    assert [row.cached for row in resumed.rows] == [True, True, None]
    whole = t5.run(cache=ScoreCache(tmp_path / "another"))
    assert without_time(resumed) == without_time(whole)
    assert resumed.sampling == whole.sampling


def test_who_wants_forecasts_gets_forecasts(bolt: Bench) -> None:
    bolt.run()
    seen: list[Quantiles] = []
    result = bolt.run(on_forecasts=lambda _, quantiles: seen.append(quantiles))
    assert bolt.forecasts == 2
    assert len(seen) == 1
    assert result.rows[0].cached is None


def test_no_cache_means_no_files(bolt: Bench) -> None:
    bolt.run(cache=None)
    assert bolt.files == []
    bolt.run()
    assert bolt.forecasts_of(cache=None) == 1


# --- damage ---------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return edit


def with_checksum(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    """Damage that the checksum does not see, such as of a version that wrote something else."""

    def edit(content: dict[str, Any]) -> None:
        change(content["content"])
        text = json.dumps(content["content"], sort_keys=True)
        content["sha256"] = hashlib.sha256(text.encode()).hexdigest()

    return edited(edit)


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "not an object": lambda text: "[1, 2]",
    "another number": edited(lambda c: c["content"]["row"].update(WQL=0.001)),
    "another key": edited(lambda c: c["key"].update(model="0" * 64)),
    "another format": edited(lambda c: c.update(format=0)),
    "no content": edited(lambda c: c.pop("content")),
    "deep": lambda text: "[" * 100_000,
    "no row": with_checksum(lambda c: c.pop("row")),
    "no object": with_checksum(lambda c: c.update(row=None)),
    "another type": with_checksum(lambda c: c["row"].update(MASE="good")),
    "another dataset": with_checksum(lambda c: c["row"].update(dataset="other")),
    "wrong sampling": with_checksum(lambda c: c.update(sampling={"seeds": 1})),
    "other series": with_checksum(lambda c: c["row"].update(series_count=99)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_measured_again(bolt: Bench, kind: str) -> None:
    whole = bolt.run()
    (file,) = bolt.files
    text = file.read_text()
    file.write_text(DAMAGE[kind](text))
    mended = bolt.run()
    assert bolt.forecasts == 2
    assert without_time(mended) == without_time(whole)
    assert bolt.forecasts_of() == 0  # the file is whole again


def test_unwritable_cache_keeps_scores(bolt: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ScoreCache(tmp_path / "file" / "scores")
    assert len(bolt.run(cache=cache).rows) == 1
    assert "cannot be written" in cache.trouble


def test_files_are_written_whole(bolt: Bench) -> None:
    bolt.run()
    (file,) = bolt.directory.iterdir()  # no temporary one is left
    assert len(file.stem) == 64
    content = json.loads(file.read_text())
    assert set(content["key"]) == {
        "model", "dataset", "protocol", "code", "versions", "hardware",
    }  # fmt: skip


# --- from the command line ------------------------------------------------------------------------


def test_command_uses_the_cache(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSCOMPRESS_CACHE", str(tmp_path / "cache"))
    command = [
        "evaluate", str(checkpoints["chronos-bolt"]), "--dataset", "monash_m1_yearly",
        "--max-series", "3", "--json",
    ]  # fmt: skip

    def cached(*options: str) -> list[Any]:
        done = CliRunner().invoke(cli.app, [*command, *options], catch_exceptions=False)
        return [row.get("cached") for row in json.loads(done.stdout)["result"]["rows"]]

    assert cached() == [None]
    assert len(list((tmp_path / "cache" / "scores").glob("*.json"))) == 2  # and seasonal naive
    assert cached() == [True]
    assert cached("--no-cache") == [None]
    assert cached("--batch-size", "auto") == [None]
