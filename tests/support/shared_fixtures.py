"""What tests of several folders share: tiny checkpoints of the true architectures, the command."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import typer.main
from chronos.chronos2 import Chronos2Model
from chronos.chronos2.config import Chronos2CoreConfig
from drawn_once import drawn_once
from filelock import FileLock
from hypothesis import HealthCheck, settings
from opened_once import opened_once
from stock_chronos import StockChronos
from transformers.utils.logging import disable_progress_bar

from tscompress.api import compress
from tscompress.benchmark import process_memory
from tscompress.benchmark.process_memory import MemoryUse
from tscompress.benchmark.sizes import bytes_on_disk
from tscompress.benchmark.workload import Workload
from tscompress.cli import app as cli
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.synthetic import SyntheticCorpus
from tscompress.families.opening import Openable
from tscompress.layers.latent_cross_attention import CACHE_NAMES
from tscompress.plotting import new_figure, save_figure
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_recipe import Architecture, PretrainRecipe, Stage
from tscompress.training.windows import Bucket
from tscompress.workflows import measure_point
from tscompress.workflows.export import export
from tscompress.workflows.save import CompressedModel, save

# The same examples in every run, and none fails for the machine it runs on.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

#: Of the repository.
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("chronos-t5", "chronos-bolt", "chronos-2")
ENVIRONMENT = os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest to set up comes first: a worker that is done takes tests from the end of
    the other's, and sets up what they need again."""
    items.sort(key=lambda item: item.path.parent.name != "hub")


def pytest_collection_finish() -> None:
    """What was imported stays: collecting garbage among it took up to a quarter of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither find nor leave anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TSCOMPRESS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _one_environment() -> Iterator[None]:
    """Datasets that are mapped put a copy in the place of ``os.environ``, which rich never sees."""
    yield
    os.environ = ENVIRONMENT  # noqa: B003  # the object itself


@pytest.fixture(scope="session", autouse=True)
def _no_bars() -> None:
    """A command says so before it imports transformers; here that has happened already."""
    disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """No test cuts the power: a kill loses nothing that was written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which fails for the same descriptors
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_made_twice() -> Iterator[None]:
    """Of what takes long and comes out the same: opened checkpoints, synthetic series, the parser
    of the command, which typer makes at each call, and rounds of garbage collection that
    accelerate asks for."""
    freed = accelerate.utils.memory.clear_device_cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Openable, "open_stock", opened_once(Openable.open_stock))
        patch.setattr(SyntheticCorpus, "sample", drawn_once(SyntheticCorpus.sample))
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        patch.setattr(accelerate.utils.memory, "clear_device_cache", lambda *_, **__: freed())
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_process_for_memory() -> Iterator[Callable[..., MemoryUse]]:
    """A process that measures memory takes seconds to start; tests that need it take
    ``memory_of_a_process``."""
    measured = process_memory.process_memory

    def stand_in(
        directory: Path, dtype: torch.dtype, workload: Workload, *, shared: bool = False
    ) -> MemoryUse:
        weights = bytes_on_disk(directory)
        return MemoryUse(2**28, 2**28 + weights, 2**28 + 2 * weights)

    with pytest.MonkeyPatch.context() as patch:
        for module in (process_memory, measure_point):
            patch.setattr(module, "process_memory", stand_in)
        yield measured


#: Modules that save figures.
_PICTURED = (
    "profiling.compared_figures", "profiling.figures", "reports.write", "workflows.evaluate_models",
    "workflows.save", "workflows.sweep",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _blank_figures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Drawing the panels of a figure takes a second; of tests that do not look at it, a figure is
    made and an empty one saved in its place. Others take ``drawn_figures``."""
    blank = tmp_path_factory.mktemp("blank") / "blank.png"
    save_figure(new_figure(1, 1), blank)
    content = blank.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        for module in _PICTURED:
            name = f"tscompress.{module}.save_figure"
            patch.setattr(name, lambda figure, path: path.write_bytes(content))
        yield


@pytest.fixture
def drawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn."""
    for module in _PICTURED:
        monkeypatch.setattr(f"tscompress.{module}.save_figure", save_figure)


@pytest.fixture
def memory_of_a_process(
    _no_process_for_memory: Callable[..., MemoryUse], monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Memory is measured in a process, of two checkpoints for all that come; which came."""
    seen: list[Path] = []
    found: list[MemoryUse] = []

    def measure(directory: Path, *arguments: Any, **options: Any) -> MemoryUse:
        seen.append(directory)
        if len(found) < 2:
            found.append(_no_process_for_memory(directory, *arguments, **options))
        return found[-1]

    for module in (process_memory, measure_point):
        monkeypatch.setattr(module, "process_memory", measure)
    return seen


def tiny_recipe(family: str, **changes: object) -> PretrainRecipe:
    """A pretraining recipe of a model with inner width 32 != d_model 24, as in mini."""
    settings: dict[str, object] = {
        "family": family,
        "name": f"tiny-{family}",
        "architecture": Architecture(
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_decoder_layers=0 if family == "chronos-2" else 2,
            num_heads=4,
            context_length=64,
            prediction_length=16,
            **({"vocab_size": 64} if family == "chronos-t5" else {}),
        ),
        "stages": (Stage(steps=4, buckets=(Bucket(context_length=32, horizon=8, batch_size=4),)),),
        "precision": "no",
        "warmup_steps": 1,
    }
    return PretrainRecipe.model_validate(settings | changes)


def tiny_chronos2() -> Chronos2Model:
    chronos_config = {
        "context_length": 128,
        "output_patch_size": 16,
        "input_patch_size": 16,
        "input_patch_stride": 16,
        "quantiles": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9],
        "use_reg_token": True,
        "use_arcsinh": True,
        "max_output_patches": 4,
    }
    return Chronos2Model(
        Chronos2CoreConfig(
            d_model=24,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            initializer_factor=0.3,
            chronos_config=chronos_config,
            chronos_pipeline_class="Chronos2Pipeline",
            architectures=["Chronos2Model"],
        )
    )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a directory with a tiny random float32 checkpoint of it."""
    root = tmp_path_factory.mktemp("checkpoints")
    found = {}
    with torch.random.fork_rng():
        for seed, family in enumerate(FAMILIES):
            torch.manual_seed(seed)
            model = tiny_chronos2() if family == "chronos-2" else build_model(tiny_recipe(family))
            if family == "chronos-bolt":
                # At the official initial scale of 0.05 every output is nearly constant.
                for parameter in model.parameters():
                    parameter.data *= 4
            found[family] = root / family
            model.save_pretrained(found[family])
    return found


#: A folded checkpoint is a stock one; a factored one opens after ``import tscompress.pipelines``.
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "folded": {"rank": 4, "ff_ratio": 0.5},
    "factored": {"method": "svd", "rank": 3},
}


def made_smaller(checkpoint: Path, kind: str) -> CompressedModel:
    """Compressed with little calibration, or none."""
    calibration = CalibrationConfig(source="synthetic", num_series=16, context_length=64)
    return compress(checkpoint, calibration=calibration, **COMPRESSIONS[kind])


@pytest.fixture(scope="session")
def compressed(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Path]:
    """Family and kind of compression to a directory with its checkpoint, made smaller."""
    return _Compressed(checkpoints, tmp_path_factory.mktemp("compressed"))


class _Compressed(dict[tuple[str, str], Path]):
    """Compresses when it is asked, within the test that asks first: no test waits for checkpoints
    that it does not need."""

    def __init__(self, checkpoints: dict[str, Path], root: Path) -> None:
        self.checkpoints, self.root = checkpoints, root

    def __missing__(self, key: tuple[str, str]) -> Path:
        family, kind = key
        with torch.random.fork_rng():
            small = made_smaller(self.checkpoints[family], kind)
            self[key] = save(small, self.root / f"{family}-{kind}")
        return self[key]


@pytest.fixture(scope="session")
def exported(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Family to a directory with the exported graphs of its checkpoint, in float32."""
    pytest.importorskip("onnxruntime")
    own = tmp_path_factory.getbasetemp()
    # Workers have the same checkpoints; one of them exports.
    return _Exported(checkpoints, own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


class _Exported(dict[str, Path]):
    """Exports a family when it is asked for: no test waits for graphs that it does not need."""

    def __init__(self, checkpoints: dict[str, Path], root: Path) -> None:
        self.checkpoints, self.root = checkpoints, root

    def __missing__(self, family: str) -> Path:
        directory = self.root / f"exported-{family}"
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                export(self.checkpoints[family], directory)
        self[family] = directory
        return directory


@pytest.fixture(scope="session")
def stock_chronos() -> Iterator[StockChronos]:
    """Stock chronos in a process of its own, without tscompress."""
    process = StockChronos()
    yield process
    process.close()


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    """Each family's checkpoint in turn."""
    return checkpoints[request.param]


Forbid = Callable[[str], None]


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Forbid:
    """A call of the function of this dotted name fails the test."""

    def replace(name: str) -> None:
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail(f"{name} was called"))

    return replace


def cache_of(output: Any) -> Any:
    """The key-value cache that a model put out, by whatever name; None: it has none."""
    return next((output[name] for name in CACHE_NAMES if name in output), None)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command as its entry point does."""

    def run(*arguments: object, surprised: bool = False) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tscompress", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        code = exit_.value.code
        captured = capsys.readouterr()
        assert ("error: unexpected " in captured.err) == surprised, captured.err
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


def assert_refused(outcome: Outcome, code: int, text: str) -> None:
    assert outcome.code == code
    assert outcome.out == ""
    # Commands say first what they read, and compress how much memory it is going to take.
    said = ("memory, about: ", "series: ")
    lines = [line for line in outcome.err.splitlines() if not line.startswith(said)]
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    assert text in lines[0]


def hear_ctrl_c() -> None:
    """In a child: what a shell starts in the background ignores it, and hands that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
