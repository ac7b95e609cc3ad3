"""Folded checkpoints in stock software: chronos-forecasting without tscompress, and sktime.

Everything that a stock process runs is a function below, sent there as source: the same lines make
the forecasts on both sides. Such functions import what they need themselves.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, reload
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chronos import BaseChronosPipeline, Chronos2Pipeline, ChronosBoltPipeline, ChronosPipeline
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoConfig

from tscompress.api import compress
from tscompress.checkpoints.integrity import stored_dtype
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.errors import UnsupportedModelError, UsageError
from tscompress.plan.schedules import RankSchedule
from tscompress.workflows.recipe import Recipe
from tscompress.workflows.run import run
from tscompress.workflows.save import save

CALIBRATION = CalibrationConfig(source="synthetic", num_series=16, context_length=64)
STOCK_CLASSES = {
    "chronos-t5": ["chronos.ChronosPipeline", "transformers.T5ForConditionalGeneration"],
    "chronos-bolt": ["chronos.ChronosBoltPipeline", "chronos.ChronosBoltModelForForecasting"],
    "chronos-2": ["chronos.Chronos2Pipeline", "chronos.Chronos2Model"],
}
#: AutoGluon 1.6 takes batch size, dtype and number of GPUs from the first of these names that a
#: model's path contains; for other paths batches are of 8.
AUTOGLUON_NAMES = (
    *(f"chronos-t5-{size}" for size in ("tiny", "mini", "small", "base", "large")),
    *(f"chronos-bolt-{size}" for size in ("mini", "small", "base")),
)


# --------------------------------------------------------------------------------------------------
# What runs in both processes
# --------------------------------------------------------------------------------------------------


def forecasts_of(pipeline: Any) -> dict[str, Any]:
    """Forecasts of fixed series: longer than the model's context, with gaps, and short ones."""
    import torch

    generator = torch.Generator().manual_seed(0)
    length = pipeline.model_context_length + 40
    long, gaps, short = torch.randn(3, length, generator=generator).cumsum(-1) + 5
    gaps = gaps[: length // 2].clone()
    gaps[3:21] = gaps[-1] = float("nan")
    series = [long, gaps, short[:19]]
    kind = type(pipeline).__name__
    if kind == "Chronos2Pipeline":
        return forecasts_of_chronos2(pipeline, series)
    if kind == "ChronosBoltPipeline":
        quantiles, median = pipeline.predict_quantiles(series, 12, quantile_levels=[0.1, 0.25])
        found = {"several": pipeline.predict(series, 12), "one": pipeline.predict(gaps)}
        return {**found, "quantiles": quantiles, "median": median}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        samples = pipeline.predict(series, prediction_length=12, num_samples=4)
        quantiles, mean = pipeline.predict_quantiles(gaps, 8, quantile_levels=[0.1, 0.25])
    return {"several": samples, "quantiles": quantiles, "mean": mean}


def forecasts_of_chronos2(pipeline: Any, series: list[Any]) -> dict[str, Any]:
    """Univariate, multivariate, across series, with covariates, and from a table."""
    import numpy as np
    import pandas as pd
    import torch

    steps, horizon = 70, 20
    rng = np.random.default_rng(1)
    weather = np.array(["sun", "rain"])
    several = rng.normal(size=(2, 3, steps)).cumsum(-1)  # [series, variates, steps]
    covariates = [
        {
            "target": target,
            "past_covariates": {
                "price": rng.normal(size=steps),
                "sales": rng.normal(size=steps),
                "weather": rng.choice(weather, size=steps),
            },
            "future_covariates": {
                "price": rng.normal(size=horizon),
                "weather": rng.choice(weather, size=horizon),
            },
        }
        for target in several
    ]
    days = pd.date_range("2024-01-01", periods=steps + horizon, freq="D")
    table = pd.DataFrame({"item_id": "a", "timestamp": days, "price": rng.normal(size=len(days))})
    past = table[:steps].assign(target=several[0, 0], other=several[1, 0])
    frame = pipeline.predict_df(
        past,
        future_df=table[steps:],
        target=["target", "other"],
        prediction_length=horizon,
        quantile_levels=[0.1, 0.5],
    )
    return {
        "univariate": torch.cat(pipeline.predict(series, horizon)),
        "default horizon": torch.cat(pipeline.predict(series)),
        "multivariate": torch.cat(pipeline.predict(torch.from_numpy(several), horizon)),
        "across series": torch.cat(pipeline.predict(series, horizon, cross_learning=True)),
        "covariates": torch.cat(pipeline.predict(covariates, horizon)),
        "table": torch.from_numpy(frame[["predictions", "0.1", "0.5"]].to_numpy(np.float64)),
    }


def answer(job: dict[str, Any]) -> None:
    """Load checkpoints as users of chronos do; leave forecasts and what was loaded."""
    import importlib.metadata
    import importlib.util
    import json
    from pathlib import Path

    import chronos
    import torch
    from safetensors.torch import save_file

    assert importlib.util.find_spec("tscompress") is None
    try:
        import tscompress  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("tscompress can be imported")

    torch.set_num_threads(job["threads"])
    libraries = ("torch", "transformers", "chronos-forecasting")
    found = {"versions": {name: importlib.metadata.version(name) for name in libraries}}
    forecasts = {}
    for name, directory in job["checkpoints"].items():
        by_config = chronos.BaseChronosPipeline.from_pretrained(directory)
        direct = type(by_config).from_pretrained(directory)
        forecasts |= {f"{name}: {key}": value for key, value in forecasts_of(by_config).items()}
        # The same lines again; sampling starts from the same seed.
        assert all(
            torch.equal(value, forecasts[f"{name}: {key}"])
            for key, value in forecasts_of(direct).items()
        ), f"{name}: the two ways to load differ"
        model = by_config.inner_model
        _, loading = type(model).from_pretrained(directory, output_loading_info=True)
        found[name] = {
            "classes": [
                f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
                for kind in (type(by_config), type(model))
            ],
            "sizes": [model.config.d_kv, model.config.d_ff],
            "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
            "complaints": {key: sorted(map(str, value)) for key, value in loading.items() if value},
        }
    output = Path(job["output"])
    save_file({key: value.contiguous() for key, value in forecasts.items()}, output / "forecasts")
    (output / "found.json").write_text(json.dumps(found))


def answer_with_sktime(job: dict[str, Any]) -> None:
    """Forecast with sktime's own copy of chronos and with the package, in two dtypes."""
    import json
    from pathlib import Path

    import numpy as np
    import pandas as pd
    import torch
    from sktime.forecasting.chronos import ChronosForecaster

    torch.set_num_threads(job["threads"])
    series = pd.Series(np.array(job["series"], dtype=np.float32))
    found = {}
    for name, directory in job["checkpoints"].items():
        for dtype in ("bfloat16", "float32"):
            for package in (False, True):
                forecaster = ChronosForecaster(
                    model_path=directory,
                    config={"torch_dtype": getattr(torch, dtype)},
                    seed=job["seed"],
                    use_source_package=package,
                )
                forecaster.fit(series)
                predicted = forecaster.predict(fh=list(range(1, job["horizon"] + 1)))
                module = type(forecaster.model_pipeline).__module__.partition(".")[0]
                found[f"{name} {dtype} {module}"] = predicted.to_numpy().ravel().tolist()
    (Path(job["output"]) / "found.json").write_text(json.dumps(found))


# --------------------------------------------------------------------------------------------------
# Stock environments
# --------------------------------------------------------------------------------------------------


def ask(python: Path, jobs: dict[Callable[..., None], dict[str, Any]], output: Path) -> list[Any]:
    """Run functions, each with its job, in a process of another environment, away from here; what
    each found. Files of one are in a folder of its name."""
    given = {}
    for function, job in jobs.items():
        place = output / function.__name__
        place.mkdir(parents=True)
        given[place.name] = {**job, "output": str(place), "threads": torch.get_num_threads()}
    sources = map(inspect.getsource, (forecasts_of, forecasts_of_chronos2, *jobs))
    script = output / "script.py"
    script.write_text(
        "from __future__ import annotations\nimport json, sys\n"
        + "\n\n".join(sources)
        + "\n\nfor name, job in json.loads(sys.argv[1]).items():\n    globals()[name](job)\n"
    )
    execute([str(python), "-I", str(script), json.dumps(given)], output)
    return [json.loads((output / name / "found.json").read_text()) for name in given]


def execute(command: list[str], directory: Path) -> None:
    """Run a command that may use nothing of this environment; its last words if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["HF_HUB_OFFLINE"] = "1"
    result = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=1800
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]


def pip_install(python: Path, directory: Path, *wanted: str) -> None:
    """From the registry that pip is set up for here."""
    execute([str(python), "-I", "-m", "pip", "install", "--quiet", *wanted], directory)


def make_environment(directory: Path, *, with_pip: bool) -> Path:
    """A new virtual environment; its interpreter."""
    venv.create(directory, with_pip=with_pip, symlinks=os.name != "nt")
    return directory / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def packages_of(python: Path) -> Path:
    """Where an interpreter keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shown = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    return Path(shown.stdout.strip())


@pytest.fixture(scope="module")
def stock_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with every package of this one but tscompress, made of links.

    A path file to the packages here would do for an editable tscompress only.
    """
    python = make_environment(tmp_path_factory.mktemp("stock") / "env", with_pip=False)
    packages = packages_of(python)
    for entry in sys.path:
        if Path(entry).name not in ("site-packages", "dist-packages"):
            continue
        for item in Path(entry).iterdir():
            link = packages / item.name
            # Path files run code or lead to editable packages, such as tscompress.
            unwanted = "tscompress" in item.name or item.suffix == ".pth"
            if not unwanted and item.name != "__pycache__" and not link.exists():
                link.symlink_to(item, target_is_directory=item.is_dir())
    return python


@pytest.fixture(scope="module")
def installed_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which pip has installed chronos-forecasting, as a user would."""
    root = tmp_path_factory.mktemp("installed")
    python = make_environment(root / "env", with_pip=True)
    wanted = [
        # Without the local part, +cpu or +cu130, which not every registry has.
        f"{name}=={Version(importlib.metadata.version(name)).public}"
        for name in ("torch", "transformers", "chronos-forecasting")
    ]
    pip_install(python, root, *wanted)
    return python


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Both sides add in the same order; and threads that wait for a busy core cost minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------


@dataclass
class Folded:
    """A folded checkpoint and what it should be."""

    directory: Path
    family: str
    sizes: list[int]  # d_kv, d_ff
    dtype: torch.dtype


def fold(source: str | Path, directory: Path, rank: int, ff_ratio: float) -> Folded:
    compressed = compress(source, rank=rank, ff_ratio=ff_ratio, calibration=CALIBRATION)
    kept_dtype = stored_dtype(compressed.directory)
    original: Any = load(source).config
    save(compressed, directory)
    return Folded(
        directory, compressed.family, [rank, round(original["d_ff"] * ff_ratio)], kept_dtype
    )


def in_bfloat16(checkpoint: Path, directory: Path) -> Path:
    pipeline = BaseChronosPipeline.from_pretrained(checkpoint, dtype=torch.bfloat16)
    pipeline.inner_model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def folded(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Folded]:
    """The reference models, stored in bfloat16, and tiny ones in float32."""
    root = tmp_path_factory.mktemp("folded")
    found = {
        name: fold(f"reference/{name}", root / f"chronos-{name}-tiny", 8, 0.25)
        for name in ("t5", "bolt")
    }
    for family, rank in (("chronos-t5", 4), ("chronos-bolt", 4), ("chronos-2", 4)):
        found[f"tiny {family}"] = fold(checkpoints[family], root / family, rank, 0.5)
    half = in_bfloat16(checkpoints["chronos-2"], root / "half")
    found["chronos-2 in bfloat16"] = fold(half, root / "chronos-2-half", 2, 0.5)
    return found


# --------------------------------------------------------------------------------------------------
# chronos-forecasting
# --------------------------------------------------------------------------------------------------


def job_of(folded: dict[str, Folded]) -> dict[str, Any]:
    return {"checkpoints": {name: str(item.directory) for name, item in folded.items()}}


@pytest.fixture(scope="module")
def of_stock(
    stock_python: Path,
    folded: dict[str, Folded],
    factored: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Any, Any]:
    """A folder, and what stock chronos finds of folded and of factored checkpoints."""
    refused = {
        "checkpoints": {family: str(path) for family, path in factored.items()},
        "classes": {family: kind.__name__ for family, kind in DIRECT.items()},
    }
    output = tmp_path_factory.mktemp("of-stock")
    return (output, *ask(stock_python, {answer: job_of(folded), open_each: refused}, output))


def check_stock(found: dict[str, Any], folded: dict[str, Folded], output: Path) -> None:
    """Stock chronos loads every checkpoint whole, and forecasts bit for bit as tscompress does."""
    for library, version in found.pop("versions").items():
        assert Version(version).public == Version(importlib.metadata.version(library)).public
    assert found == {
        name: {
            "classes": STOCK_CLASSES[item.family],
            "sizes": item.sizes,
            "dtypes": [str(item.dtype)],
            "complaints": {},
        }
        for name, item in folded.items()
    }
    theirs = load_file(output / answer.__name__ / "forecasts")
    ours = {
        f"{name}: {key}": value
        for name, item in folded.items()
        for key, value in forecasts_of(load(item.directory).forecaster).items()
    }
    assert sorted(ours) == sorted(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    for name, forecast in ours.items():
        assert torch.isfinite(forecast).all(), name
        assert forecast.std() > 0, name


def test_stock_chronos_forecasts_the_same(
    of_stock: tuple[Path, Any, Any], folded: dict[str, Folded]
) -> None:
    output, found, _ = of_stock
    found = dict(found)  # what is checked is taken out
    check_stock(found, folded, output)
    for name, item in folded.items():
        config = json.loads((item.directory / "config.json").read_text())
        # Readers before transformers 4.56 know the second name only.
        dtype = str(item.dtype).removeprefix("torch.")
        assert (config["dtype"], config["torch_dtype"]) == (dtype, dtype), name
        stored = load_file(item.directory / "model.safetensors").values()
        assert {tensor.dtype for tensor in stored} == {item.dtype}, name


@pytest.mark.slow
def test_chronos_from_the_registry_forecasts_the_same(
    installed_python: Path, folded: dict[str, Folded], tmp_path: Path
) -> None:
    (found,) = ask(installed_python, {answer: job_of(folded)}, tmp_path)
    check_stock(found, folded, tmp_path)


@pytest.mark.slow
def test_sktime_forecasts_the_same(
    installed_python: Path, folded: dict[str, Folded], tmp_path: Path
) -> None:
    """It forecasts one series: the median of samples, or of quantiles."""
    from transformers import set_seed

    pip_install(installed_python, tmp_path, "sktime>=1.2,<2")
    seed, horizon = 3, 12
    series = (np.random.default_rng(0).normal(size=120).cumsum() + 20).astype(np.float32)
    job = {
        "checkpoints": {name: str(folded[name].directory) for name in ("t5", "bolt")},
        "series": series.tolist(),
        "seed": seed,
        "horizon": horizon,
    }
    (found,) = ask(installed_python, {answer_with_sktime: job}, tmp_path)
    for name in ("t5", "bolt"):
        for dtype in ("bfloat16", "float32"):
            pipeline = load(folded[name].directory, dtype=dtype).forecaster
            with torch.random.fork_rng(devices=[]):
                set_seed(seed)
                ours = np.median(pipeline.predict(torch.from_numpy(series), horizon)[0], axis=0)
            for package in ("chronos", "sktime"):
                theirs = np.array(found[f"{name} {dtype} {package}"], dtype=np.float32)
                if (name, dtype, package) == ("bolt", "bfloat16", "sktime"):
                    # Its own copy of Bolt also scales the series in bfloat16.
                    np.testing.assert_allclose(theirs, ours, rtol=2**-7)
                else:
                    np.testing.assert_array_equal(theirs, ours)


# --------------------------------------------------------------------------------------------------
# AutoGluon
# --------------------------------------------------------------------------------------------------


def autogluon_name(path: Path) -> str | None:
    return next((name for name in AUTOGLUON_NAMES if name in str(path)), None)


@pytest.mark.parametrize(
    ("family", "name"),
    [("chronos-bolt", "chronos-bolt-small"), ("chronos-t5", "chronos-t5-base")],
)
def test_a_walk_keeps_the_name_that_autogluon_reads(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    model = Path(shutil.copytree(checkpoints[family], tmp_path / "models" / name))
    recipe = Recipe(
        model=str(model),
        output=str(tmp_path / "out"),
        schedule=RankSchedule(rank=4),
        ff_ratio=0.5,
        calibration=CalibrationConfig(num_series=4, context_length=32),
        profile=None,
        evaluation=None,
        bench=None,
    )
    directory = run(recipe).directory
    (checkpoint,) = (path.parent for path in directory.rglob("config.json"))
    assert checkpoint.name.startswith(name)
    assert autogluon_name(checkpoint) == autogluon_name(model) == name


# --------------------------------------------------------------------------------------------------
# Factored checkpoints
# --------------------------------------------------------------------------------------------------

DIRECT = {
    "chronos-t5": ChronosPipeline,
    "chronos-bolt": ChronosBoltPipeline,
    "chronos-2": Chronos2Pipeline,
}


@pytest.fixture(scope="module")
def factored(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("factored")
    return {
        family: save(compress(checkpoints[family], method="svd", rank=3), root / family)
        for family in DIRECT
    }


def open_each(job: dict[str, Any]) -> None:
    """Every way into chronos and into transformers that a factored checkpoint may meet."""
    import json
    from pathlib import Path

    import chronos
    import transformers

    ways = {
        name: getattr(chronos, name).from_pretrained
        for name in ("BaseChronosPipeline", *job["classes"].values())
    }
    ways |= {
        name: getattr(transformers, name).from_pretrained
        for name in ("AutoModel", "AutoModelForSeq2SeqLM", "T5ForConditionalGeneration")
    }
    ways |= {
        kind.__name__: kind.from_pretrained
        for kind in (chronos.chronos_bolt.ChronosBoltModelForForecasting, chronos.Chronos2Model)
    }
    found = {}
    for family, directory in job["checkpoints"].items():
        for name, way in ways.items():
            try:
                way(directory)
            except Exception as error:
                found[f"{family} {name}"] = type(error).__name__
            else:
                found[f"{family} {name}"] = None
    (Path(job["output"]) / "found.json").write_text(json.dumps(found))


def test_factored_checkpoint_needs_the_import(of_stock: tuple[Path, Any, Any]) -> None:
    """None of these ways may start from random weights without a word."""
    *_, found = of_stock
    assert len(found) == 3 * 9
    assert [way for way, error in found.items() if error is None] == []


@pytest.mark.parametrize("family", DIRECT)
def test_direct_classes_open_factored_checkpoints_after_the_import(
    factored: dict[str, Path], checkpoints: dict[str, Path], family: str
) -> None:
    import_module("tscompress.pipelines")
    opened = DIRECT[family].from_pretrained(factored[family])
    assert type(opened) is DIRECT[family]
    ours = forecasts_of(load(factored[family]).forecaster)
    theirs = forecasts_of(opened)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # sktime passes the path by name, and these.
    half = DIRECT[family].from_pretrained(
        pretrained_model_name_or_path=str(factored[family]),
        torch_dtype=torch.bfloat16,
        device_map="cpu",
    )
    assert half.inner_model.dtype is torch.bfloat16
    # All others open as ever.
    stock = DIRECT[family].from_pretrained(checkpoints[family])
    assert type(stock) is DIRECT[family]
    ours, theirs = (forecasts_of(one) for one in (load(checkpoints[family]).forecaster, stock))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", DIRECT)
def test_options_of_stock_pipelines_are_taken(factored: dict[str, Path], family: str) -> None:
    import_module("tscompress.pipelines")
    plain: Any = load(factored[family]).forecaster
    own: Any = type("Own", (DIRECT[family],), {})
    given = {"device_map": {"": "cpu"}, "revision": "main"}  # of a Hub id: not read here
    opened = own.from_pretrained(factored[family], **given)
    assert type(opened) is own
    expected, weights = (one.inner_model.state_dict() for one in (plain, opened))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    series = torch.arange(40.0).reshape(1, 1, -1) if family == "chronos-2" else torch.arange(40.0)
    assert len(opened.predict(series, 4)) == 1
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="cuda:0"):  # a number is a GPU
            DIRECT[family].from_pretrained(factored[family], device_map=0)


def test_the_class_of_another_family_is_refused(factored: dict[str, Path]) -> None:
    import_module("tscompress.pipelines")
    with pytest.raises(UnsupportedModelError, match=r"ChronosBoltPipeline.*ChronosPipeline"):
        ChronosPipeline.from_pretrained(factored["chronos-bolt"])
    with pytest.raises(OSError, match="nowhere"):  # as without the import
        ChronosPipeline.from_pretrained("./nowhere")


def test_repeated_import_wraps_once() -> None:
    module = import_module("tscompress.pipelines")
    before = [kind.from_pretrained.__func__ for kind in DIRECT.values()]
    reload(module)
    assert [kind.from_pretrained.__func__ for kind in DIRECT.values()] == before


@pytest.mark.parametrize("family", DIRECT)
def test_architectures_are_known_after_the_import_alone(
    factored: dict[str, Path], checkpoints: dict[str, Path], family: str
) -> None:
    """sktime tells Bolt from T5 by them; chronos starts from what chronos_config says."""
    stored = json.loads((factored[family] / "config.json").read_text())
    assert not {"architectures", "chronos_config"} & stored.keys()
    import_module("tscompress.pipelines")
    config = AutoConfig.from_pretrained(factored[family])
    assert config.architectures == load(checkpoints[family]).config["architectures"]
    assert not hasattr(config, "chronos_config")
