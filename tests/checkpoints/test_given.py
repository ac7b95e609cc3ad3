"""Models as users hold them: each measurement with each, short texts of results, and refusals."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chronos import BaseChronosPipeline
from chronos.base import PipelineRegistry
from huggingface_hub.utils import are_progress_bars_disabled
from shared_fixtures import FAMILIES, Command
from transformers.utils import logging as transformers_logging

import tscompress
from tscompress.checkpoints.given import loaded_of, stored_in, weights_directory
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.io.quiet import quiet_transformers

YEARLY = ["monash_m1_yearly"]
FEW: dict[str, Any] = {"datasets": YEARLY, "max_series": 2, "num_samples": None}
QUICK = CalibrationConfig(num_series=8, context_length=32, batch_size=4)


def predictor_of(*pipelines: Any) -> Any:
    """A predictor of gluonts, as its users write around a pipeline."""
    # Imported after tscompress, which keeps its advice about JSON libraries quiet.
    from gluonts.model.predictor import RepresentablePredictor

    predictor = RepresentablePredictor(prediction_length=4)
    for number, pipeline in enumerate(pipelines):
        setattr(predictor, f"pipeline_{number}", pipeline)
    return predictor


class AutoGluonChronos:
    """The parts of AutoGluon 1.6's Chronos models that lead to the pipeline."""

    def __init__(self, name: str, pipeline: Any, **transforms: Any) -> None:
        self.name, self.stored = name, pipeline
        self._model_pipeline: Any = None  # until it is needed, and in a loaded predictor
        self.target_scaler = transforms.get("target_scaler")
        self.covariate_scaler = self.covariate_regressor = None

    def load_model_pipeline(self) -> None:
        self._model_pipeline = self.stored


def autogluon(models: dict[str, Any], best: str = "") -> Any:
    """The parts of a ``TimeSeriesPredictor`` that lead to its models."""
    trainer = SimpleNamespace(get_model_names=lambda: list(models), load_model=models.__getitem__)
    learner = SimpleNamespace(load_trainer=lambda: trainer)
    return SimpleNamespace(_learner=learner, model_best=best or next(iter(models)), predict=print)


def backtested(model: Any) -> Any:
    """AutoGluon's wrapper of a model that was fitted for several windows."""
    return SimpleNamespace(most_recent_model=model)


def in_autogluon(path: Path) -> Any:
    model = AutoGluonChronos("Chronos[tiny]", load(path).forecaster)
    others = {"WeightedEnsemble": object(), "SeasonalNaive": object()}
    return autogluon({"Chronos[tiny]": backtested(model), **others}, best="WeightedEnsemble")


#: A model as it is given, made from the directory of a checkpoint.
KINDS: dict[str, Callable[[Path], Any]] = {
    "text": str,
    "path": Path,
    "loaded": load,
    "pipeline": lambda path: BaseChronosPipeline.from_pretrained(path),
    "gluonts": lambda path: predictor_of(load(path).forecaster),
    "autogluon": in_autogluon,
}
#: A measurement of a model, to what says which model it was of.
MEASUREMENTS: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda model: tscompress.evaluate(model, **FEW),
    "compare": lambda model: tscompress.compare([model, model], **FEW),
    "profile": lambda model: tscompress.profile(model, calibration=None),
    "probe": lambda model: tscompress.probe(model, ["period-4"], num_series=3),
    "bench": lambda model: tscompress.bench(
        model, batch_size=2, context_length=32, horizon=4, repeats=1, warmup=0
    ),
    "sensitivities": lambda model: tscompress.sensitivities(model, calibration=QUICK),
}


@pytest.fixture(scope="module")
def given(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of chronos itself
        return KINDS[request.param](checkpoints["chronos-bolt"])


@pytest.mark.parametrize(
    ("given", "measurement"),
    [
        (kind, measurement)
        for kind in KINDS
        for measurement in MEASUREMENTS
        # They take longest, and open a model as `probe` does.
        if measurement != "sensitivities" or kind in ("path", "gluonts")
    ],
    indirect=["given"],
)
def test_every_measurement_takes_every_kind_of_model(measurement: str, given: Any) -> None:
    found = MEASUREMENTS[measurement](given)
    text = repr(found)
    assert text.startswith(f"{type(found).__name__}(")
    assert len(text.splitlines()) == 1
    assert len(text) < 300
    assert str(found) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_has_the_scores_of_its_checkpoint(
    family: str, checkpoints: dict[str, Path]
) -> None:
    path = checkpoints[family]
    options = FEW | ({"num_samples": 2} if family == "chronos-t5" else {})
    pipeline = BaseChronosPipeline.from_pretrained(path)
    (ours,) = tscompress.evaluate(pipeline, **options).rows
    (theirs,) = tscompress.evaluate(path, **options).rows
    assert ours.series == theirs.series
    loaded = loaded_of(pipeline)
    assert (loaded.family, loaded.name, loaded.directory) == (family, family, None)
    assert loaded.architecture == load(path).architecture
    ranks = [tscompress.profile(one, calibration=None).weights for one in (pipeline, path)]
    assert ranks[0] == ranks[1]


def test_a_model_in_memory_is_left_as_it_was(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"], dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    tscompress.sensitivities(loaded, calibration=QUICK)
    after = loaded.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.bfloat16}


def test_weights_lie_in_a_directory_until_the_model_is_changed(
    checkpoints: dict[str, Path],
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    assert weights_directory(loaded) == checkpoints["chronos-bolt"]
    small = tscompress.compress(loaded, rank=4, calibration=QUICK)
    assert weights_directory(small) is None
    sizes = {"batch_size": 1, "context_length": 32, "horizon": 4, "repeats": 1, "warmup": 0}
    found = tscompress.bench(small, against=checkpoints["chronos-bolt"], **sizes)
    original, compressed = found.models
    assert original.bytes_on_disk is not None
    assert compressed.bytes_on_disk is None
    assert compressed.parameters < original.parameters


@pytest.mark.parametrize("kind", ["original", "folded", "factored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_hold_the_weights_of_a_model_until_it_is_changed(
    family: str, kind: str, checkpoints: dict[str, Path],
    compressed: dict[tuple[str, str], Path],
) -> None:  # fmt: skip
    directory = checkpoints[family] if kind == "original" else compressed[family, kind]
    loaded = load(directory)
    assert stored_in(loaded) == directory
    pipeline = loaded.forecaster
    pipeline.inner_model.config._name_or_path = str(directory)
    assert stored_in(loaded_of(pipeline)) == directory
    weights = {one.data_ptr(): one for one in loaded.model.state_dict().values()}  # tied ones once
    every = 1 if (family, kind) == ("chronos-bolt", "factored") else 7
    for weight in list(weights.values())[::every]:
        before = weight.clone()
        weight.view(-1)[-1] += 1
        assert stored_in(loaded) is None
        weight.copy_(before)
    assert stored_in(loaded) == directory


def test_files_do_not_hold_a_table_that_was_untied(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-t5"])
    model: Any = loaded.forecaster.inner_model
    model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone() + 1)
    assert stored_in(loaded) is None


def test_names_of_results(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    sizes = {"batch_size": 1, "context_length": 32, "horizon": 4, "repeats": 1, "warmup": 0}
    names = [one.name for one in tscompress.bench([loaded, loaded], **sizes).models]
    assert names == ["chronos-bolt", "chronos-bolt (2)"]
    assert tscompress.evaluate(loaded, name="mine", **FEW).model == "mine"
    assert tscompress.evaluate("seasonal-naive", **FEW).model == "seasonal-naive"
    assert tscompress.probe(loaded, ["period-4"], num_series=3, name="mine").model == "mine"
    assert loaded.name == "chronos-bolt"


def test_names_of_datasets_from_an_iterator(checkpoints: dict[str, Path]) -> None:
    found = tscompress.evaluate(
        checkpoints["chronos-bolt"], datasets=(name for name in YEARLY), max_series=2
    )
    assert [row.dataset for row in found.rows] == YEARLY


def test_progress_counts_the_datasets_of_each_model() -> None:
    told: list[tuple[str, int, int]] = []
    models = ["seasonal-naive", "seasonal-naive"]
    tscompress.compare(models, **FEW, on_progress=lambda *step: told.append(step))
    total = len(FEW["datasets"])
    assert told == 2 * [("evaluate seasonal-naive", done + 1, total) for done in range(total)]


def test_former_keywords(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    with pytest.warns(DeprecationWarning, match="model"):
        assert tscompress.profile(loaded=loaded, calibration=None).model == loaded.name  # type: ignore[call-arg]


def test_the_shell_and_the_api_find_the_same(
    command: Command, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = checkpoints["chronos-bolt"]
    output = tmp_path / "scores.json"
    options = ("--dataset", *YEARLY, "--max-series", 2, "--no-cache")
    assert command("evaluate", path, *options, "--output", output).code == 0
    found = tscompress.evaluate(path, **FEW)
    assert tscompress.EvaluationResult.load(output).rows[0].series == found.rows[0].series
    assert tscompress.compare([output, found]).models[0].WQL.ratio == pytest.approx(1)
    assert tscompress.compare([output, path], **FEW).models[0].WQL.ratio == pytest.approx(1)
    series = tmp_path / "sales.csv"
    series.write_text("id,time,value\n" + "".join(f"a,20{n}-01-01,{n}\n" for n in range(10, 40)))
    options = ("--suite", series, "--horizon", 3, "--id-column", "id", "--no-cache", "--json")
    shell = command("evaluate", path, *options).json["result"]["rows"][0]
    (row,) = tscompress.evaluate(path, series, horizon=3, id_column="id").rows
    assert (shell["WQL"], shell["MASE"]) == (row.WQL, row.MASE)


# --------------------------------------------------------------------------------------------------
# Predictors
# --------------------------------------------------------------------------------------------------


def test_a_chronos_model_of_autogluon(checkpoints: dict[str, Path]) -> None:
    pipeline = load(checkpoints["chronos-2"]).forecaster
    alone = AutoGluonChronos("Chronos2", pipeline)
    assert loaded_of(alone).pipeline is pipeline
    several = {"Chronos2": alone, "Chronos[other]": AutoGluonChronos("Chronos[other]", pipeline)}
    found = loaded_of(autogluon(several, best="Chronos2"))
    assert (found.name, found.family) == ("Chronos2", "chronos-2")
    with pytest.raises(UsageError, match="export_model"):
        loaded_of(autogluon({**several, "WeightedEnsemble": object()}, best="WeightedEnsemble"))
    with pytest.raises(UsageError, match="SeasonalNaive"):
        loaded_of(autogluon({"SeasonalNaive": object()}))
    scaled = AutoGluonChronos("Chronos2", pipeline, target_scaler=object())
    with pytest.raises(UsageError, match="target_scaler"):
        loaded_of(autogluon({"Chronos2": scaled}))


def test_a_predictor_without_a_pipeline_or_with_two(checkpoints: dict[str, Path]) -> None:
    pipelines = [load(checkpoints[family]).forecaster for family in FAMILIES[:2]]
    with pytest.raises(UsageError, match="2 pipelines"):
        loaded_of(predictor_of(*pipelines))
    with pytest.raises(UsageError, match="RepresentablePredictor"):
        loaded_of(predictor_of())


# --------------------------------------------------------------------------------------------------
# Refusals
# --------------------------------------------------------------------------------------------------


def test_options_of_loading_go_with_a_path(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    for name, value in {"revision": "main", "device": "cuda", "dtype": "bfloat16"}.items():
        with pytest.raises(UsageError, match=name):
            loaded_of(loaded, **{name: value})  # type: ignore[arg-type]
    assert loaded_of(loaded, device="cpu", dtype="float32") is loaded
    for options in ({"revision": "main"}, {"device": "cuda"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            tscompress.compress(loaded, rank=4, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="device"):
        tscompress.recover(loaded, loaded, device="cuda")
    loaded.model.train()
    with pytest.raises(UsageError, match="training mode"):
        tscompress.compress(loaded, rank=4)


def test_pipelines_that_cannot_be_measured(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = load(checkpoints["chronos-bolt"]).forecaster
    pipeline.inner_model.train()
    with pytest.raises(UsageError, match="training mode"):
        loaded_of(pipeline)
    pipeline.inner_model = torch.nn.Linear(1, 1)  # as adapters of peft are around the model
    with pytest.raises(UsageError, match="Linear"):
        loaded_of(pipeline)
    # A class of this name takes the place of chronos' own in its registry.
    monkeypatch.setattr(PipelineRegistry, "REGISTRY", dict(PipelineRegistry.REGISTRY))
    foreign = type("ChronosBoltPipeline", (BaseChronosPipeline,), {"__module__": "copied.bolt"})
    with pytest.raises(UnsupportedModelError, match=r"copied\.bolt"):
        loaded_of(foreign(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "model", [None, 5, 1.5, [1], torch.nn.Linear(1, 1), object()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_no_model(measurement: str, model: Any) -> None:
    with pytest.raises(UsageError) as refused:
        MEASUREMENTS[measurement](model)
    assert len(str(refused.value).splitlines()) == 1


def recover_itself(model: Any, **options: Any) -> Any:
    return tscompress.recover(model, model, **options)


#: Option, wrong value, and the function that takes it; the model is not looked at.
WRONG: list[tuple[str, Any, Any]] = [
    *(("max_series", value, tscompress.evaluate) for value in ("3", 1.5, True)),
    ("suite", 5, tscompress.evaluate),
    ("datasets", "monash_m1_yearly", tscompress.evaluate),
    ("datasets", 5, tscompress.evaluate),
    ("seed", None, tscompress.evaluate),
    ("seeds", 3, tscompress.evaluate),
    ("name", 5, tscompress.evaluate),
    ("root", 5, tscompress.evaluate),
    ("cache", True, tscompress.evaluate),
    ("horizon", "3", tscompress.evaluate),
    ("id_column", "a", tscompress.evaluate),
    ("max_serie", 3, tscompress.evaluate),
    ("margin", "0.1", tscompress.compare),
    ("resamples", 100.5, tscompress.compare),
    ("resamples", None, tscompress.compare),
    ("seed", None, tscompress.compare),
    ("reference", "x", tscompress.compare),
    ("on_dataset", print, tscompress.compare),
    ("epsilons", 0.1, tscompress.profile),
    ("epsilons", ["0.1"], tscompress.profile),
    ("calibration", {"num_series": 8}, tscompress.profile),
    ("tasks", 5, tscompress.probe),
    ("tasks", [5], tscompress.probe),
    ("num_series", "3", tscompress.probe),
    ("seed", None, tscompress.probe),
    ("workload", {"repeats": 1}, tscompress.bench),
    ("repeat", 1, tscompress.bench),
    ("calibration", 5, tscompress.sensitivities),
    ("fold", {}, tscompress.sensitivities),
    ("series", 5, tscompress.sensitivities),
    ("plan", {}, tscompress.compress),
    ("calibration", {}, tscompress.compress),
    ("series", 5, tscompress.compress),
    ("exclude", "encoder*", tscompress.compress),
    ("revision", 5, tscompress.load),
    ("revision", "main", tscompress.load),
    ("series", 5, recover_itself),
    ("directory", 5, recover_itself),
    ("config", {"steps": 1}, recover_itself),
]


@pytest.mark.parametrize(("name", "value", "function"), WRONG)
def test_wrong_types_are_refused_by_name(name: str, value: Any, function: Any) -> None:
    with pytest.raises(UsageError, match=name) as refused:
        function("reference/bolt-nano", **{name: value})
    assert len(str(refused.value).splitlines()) == 1


def test_functions_that_keep_provenance_take_no_pipeline(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    pipeline = loaded.forecaster
    with pytest.raises(UsageError, match="ChronosBoltPipeline"):
        tscompress.compress(pipeline, rank=4)
    with pytest.raises(UsageError, match="student"):
        tscompress.recover(pipeline, loaded)
    with pytest.raises(UsageError, match="teacher"):
        tscompress.recover(loaded, pipeline)
    with pytest.raises(UsageError, match="LoadedModel"):
        tscompress.save(loaded, tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="directory"):
        tscompress.push(loaded, "me/x", dry_run=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ChronosBoltPipeline"):
        tscompress.load(pipeline)


# --------------------------------------------------------------------------------------------------
# What is seen of it
# --------------------------------------------------------------------------------------------------


def test_short_texts_of_models(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    loaded = load(checkpoints["chronos-bolt"])
    assert repr(loaded).startswith("LoadedModel('chronos-bolt', chronos-bolt, ")
    assert repr(loaded).endswith("parameters, float32, cpu)")
    small = tscompress.compress(loaded, rank=4, calibration=QUICK)
    assert repr(small).startswith("CompressedModel('chronos-bolt', chronos-bolt, ")
    assert "d_kv 4" in repr(small)
    assert "d_kv 4" in repr(small.plan)
    for text in (repr(small), repr(small.plan)):
        assert len(text.splitlines()) == 1


def test_tables_of_results_in_notebooks() -> None:
    naive = tscompress.evaluate("seasonal-naive", **FEW)
    for found in (naive, tscompress.compare([naive, naive])):
        assert found._repr_html_().startswith("<table")


def test_loading_is_quiet_and_changes_no_settings(
    checkpoints: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    state: list[Any] = []

    def settings() -> tuple[Any, ...]:
        theirs = transformers_logging
        return (
            theirs.is_progress_bar_enabled(),
            theirs.get_verbosity(),
            are_progress_bars_disabled(),
        )

    transformers_logging.enable_progress_bar()
    try:
        before = settings()
        with quiet_transformers():
            with quiet_transformers():
                state.append(settings())
            state.append(settings())
        assert state == [(False, logging.ERROR, True)] * 2
        assert settings() == before
        capfd.readouterr()
        load(checkpoints["chronos-bolt"])
        assert capfd.readouterr() == ("", "")
        assert settings() == before
        with pytest.raises(UsageError, match="inside"), quiet_transformers():
            raise UsageError("inside")
        assert settings() == before
    finally:
        transformers_logging.disable_progress_bar()
