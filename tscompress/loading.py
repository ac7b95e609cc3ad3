"""Reading checkpoints: Hub ids, directories, the shipped references, and what tscompress wrote."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from chronos import BaseChronosPipeline, Chronos2Pipeline, ChronosBoltPipeline, ChronosPipeline
from chronos.chronos import ChronosConfig, ChronosModel
from chronos.chronos2 import Chronos2Model
from chronos.chronos_bolt import ChronosBoltModelForForecasting
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, T5ForConditionalGeneration

from tscompress.architectures import FAMILIES, Architecture, describe, family_of
from tscompress.errors import (
    CorruptCheckpointError,
    GatedModelError,
    ModelLoadError,
    ModelNotFoundError,
    OfflineError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.factored import (
    WEIGHTS_FILE,
    apply_structure_,
    is_factored_config,
    load_weights_strictly_,
    read_plan,
)
from tscompress.plan import Plan

REFERENCE_PREFIX = "reference/"
_LAYER_NORM = {"gamma": "weight", "beta": "bias"}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass
class LoadedModel:
    """A model in memory and where it came from.

    Attributes
    ----------
    model
        The inner transformers model, in ``eval`` mode.
    pipeline
        The chronos pipeline around it; None for families that do not forecast.
    config
        The checkpoint's ``config.json`` as it was read; of a factored checkpoint, the original's.
    source
        What :func:`load` was asked for. ``name`` is for people, ``source`` for provenance.
    revision
        The commit that a Hub id resolved to.
    plan
        The plan of a factored checkpoint.
    stored_dtype
        The dtype of the weights on disk, in which a compressed model is written back.
    """

    model: nn.Module
    pipeline: BaseChronosPipeline | None
    family: str
    name: str
    source: str
    directory: Path
    stored_dtype: torch.dtype
    config: Mapping[str, Any] = field(repr=False)
    revision: str | None = None
    plan: Plan | None = None

    @property
    def architecture(self) -> Architecture:
        return describe(self.family, self.model)

    @property
    def forecaster(self) -> BaseChronosPipeline:
        """The pipeline.

        Raises
        ------
        UnsupportedModelError
            The family is for profiling only.
        """
        if self.pipeline is None:
            able = [name for name, family in FAMILIES.items() if family.forecasts]
            raise UnsupportedModelError(
                f"{self.name!r} is a {self.family} model, which does not forecast; "
                f"families that do: {', '.join(able)}."
            )
        return self.pipeline


def load(
    model: str | Path,
    *,
    revision: str | None = None,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
) -> LoadedModel:
    """Load a checkpoint through chronos' own pipelines.

    Parameters
    ----------
    model
        A Hub id (``amazon/chronos-bolt-small``), a directory, ``reference/bolt``, ``reference/t5``,
        or the output of ``tscompress compress``.
    revision
        Branch, tag or commit of a Hub id.
    device
        ``cpu``, ``cuda``, ``cuda:1``, ...
    dtype
        ``float32``, ``bfloat16``, ``float16`` or a torch dtype; None keeps the stored one.

    Raises
    ------
    ModelNotFoundError, GatedModelError, OfflineError
        The checkpoint could not be had.
    UnsupportedModelError
        It is of another family, or has no safetensors weights.
    CorruptCheckpointError
        It is truncated, incomplete, or holds weights that are not finite.
    UsageError
        ``device`` or ``dtype`` is not available.
    """
    source = str(model)
    device = _check_device(device)
    directory, commit = _locate(source, revision)
    config = read_config(directory, source)
    _check_weight_files(directory, source)
    target_dtype = _resolve_dtype(dtype)
    if is_factored_config(config):
        loaded = _load_factored(source, directory, config, target_dtype)
    else:
        loaded = _load_stock(source, directory, config, target_dtype)
    loaded.revision = commit
    _check_finite(loaded.model, source)
    loaded.model.to(device).eval()
    return loaded


def load_plan(directory: str | Path) -> Plan:
    """The plan of a factored checkpoint, without its weights."""
    config = read_config(Path(directory), str(directory))
    if not is_factored_config(config):
        raise UnsupportedModelError(f"{str(directory)!r} is not a factored checkpoint.")
    return read_plan(config, Path(directory))


# --------------------------------------------------------------------------------------------------
# Where it is
# --------------------------------------------------------------------------------------------------


def _locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    """The directory of a checkpoint and, of a Hub id, the commit."""
    if not source.strip():  # Path("") is the current directory
        raise ModelNotFoundError(f"there is no directory {source!r}.")
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"{source!r} is a directory; a revision goes with a Hub id only.")
        return path, None
    if path.is_file():
        raise ModelNotFoundError(f"{source!r} is a file; give the directory that holds it.")
    if source.startswith(REFERENCE_PREFIX):
        return _reference_directory(source), None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelNotFoundError(f"there is no directory {source!r}.")
    return _download(source, revision)


def _reference_directory(source: str) -> Path:
    root = Path(str(files("tscompress").joinpath("reference")))
    available = sorted(p.parent.name for p in root.glob("*/config.json"))
    name = source.removeprefix(REFERENCE_PREFIX)
    if name not in available:
        shipped = ", ".join(REFERENCE_PREFIX + item for item in available)
        raise ModelNotFoundError(f"there is no {source!r}; shipped: {shipped}.")
    return root / name


def _download(source: str, revision: str | None) -> tuple[Path, str | None]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # huggingface-hub speaks httpx; before version 1 it spoke requests, whose errors are OSErrors.
    network_errors: tuple[type[Exception], ...] = (OSError,)
    with contextlib.suppress(ImportError):
        import httpx

        network_errors = (httpx.TransportError, ConnectionError, TimeoutError)

    unreachable = OfflineError(
        f"{source!r} is not in the local cache and the Hub cannot be reached; "
        "connect, or give a directory."
    )
    try:
        found = snapshot_download(
            source, revision=revision, allow_patterns=["*.json", "*.safetensors"]
        )
    except GatedRepoError:
        raise GatedModelError(
            f"{source!r} is gated; ask for access on its Hub page and run `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no revision {revision!r} on the Hub.") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{source!r} is neither a directory nor a model on the Hub that you may read; "
            "check the spelling, or run `hf auth login` if it is private."
        ) from None
    except HFValidationError:
        raise ModelNotFoundError(
            f"{source!r} is neither a directory nor a Hub id such as 'amazon/chronos-bolt-small'."
        ) from None
    except LocalEntryNotFoundError:
        raise unreachable from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "unknown")
        raise ModelLoadError(f"the Hub answered {source!r} with HTTP status {status}.") from None
    except network_errors:
        raise unreachable from None
    directory = Path(found)
    # snapshots are cached under their commit: .../snapshots/<commit>
    return directory, directory.name


# --------------------------------------------------------------------------------------------------
# Whether it is whole
# --------------------------------------------------------------------------------------------------


def read_config(directory: Path, source: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises
    ------
    ModelNotFoundError
        There is none.
    CorruptCheckpointError
        It is not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no config.json; is it a checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source!r}: config.json is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{source!r}: config.json is not an object.")
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from the index if it is sharded."""
    index = directory / "model.safetensors.index.json"
    single = directory / WEIGHTS_FILE
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = any(Path(name).name != name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CorruptCheckpointError(f"{index} is not a safetensors index.") from None
    if outside:
        raise CorruptCheckpointError(f"{index} points outside its directory.")
    return [directory / name for name in sorted(names)]


def _check_weight_files(directory: Path, source: str) -> None:
    found = weight_files(directory)
    if not found:
        pickles = sorted(p.name for p in directory.glob("*.bin"))
        if pickles:
            raise UnsupportedModelError(
                f"{source!r} has only pickled weights ({pickles[0]}); tscompress reads safetensors "
                "and never unpickles."
            )
        raise ModelNotFoundError(f"{source!r} has no {WEIGHTS_FILE}.")
    for path in found:
        try:
            with safe_open(path, framework="pt"):
                pass
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{source!r} lacks {path.name}.") from None
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} is truncated or damaged ({error}); fetch it again."
            ) from None


def _stored_keys(directory: Path) -> set[str]:
    keys: set[str] = set()
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as reader:
            keys.update(reader.keys())
    return keys


def stored_dtype(directory: Path) -> torch.dtype:
    """The floating-point dtype of most stored tensors."""
    counts: dict[str, int] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118
                name = reader.get_slice(key).get_dtype()
                counts[name] = counts.get(name, 0) + 1
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    floating = {name: count for name, count in counts.items() if name in names}
    if not floating:
        return torch.float32
    return names[max(floating, key=lambda name: floating[name])]


def _check_finite(model: nn.Module, source: str) -> None:
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CorruptCheckpointError(f"{source!r}: {name} has values that are not finite.")


def _check_device(device: str) -> str:
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise UsageError(f"{device!r} is not a device; try cpu or cuda.") from None
    if wanted.type == "meta":  # shapes without values
        raise UsageError(f"{device!r} is not a device; try cpu or cuda.")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r} was asked for, but torch sees no CUDA; use cpu.")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no {device!r}; torch sees {torch.cuda.device_count()} device(s)."
        )
    return device


def _resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype {str(dtype)!r} is not one of {', '.join(DTYPES)}.")
    return found


# --------------------------------------------------------------------------------------------------
# Into memory
# --------------------------------------------------------------------------------------------------


def _load_stock(
    source: str, directory: Path, config: Mapping[str, Any], dtype: torch.dtype | None
) -> LoadedModel:
    family = _family(config, source)
    kept_dtype = stored_dtype(directory)
    with _misfits(source):
        if FAMILIES[family].forecasts:
            pipeline = BaseChronosPipeline.from_pretrained(directory, dtype=dtype or kept_dtype)
            model = pipeline.inner_model
        else:
            pipeline = None
            model = _model_class(config).from_pretrained(
                directory, dtype=dtype or kept_dtype, trust_remote_code=False
            )
    _check_keys(model, _stored_keys(directory), source)
    return LoadedModel(
        model, pipeline, family, model_name(source), source, directory, kept_dtype, config
    )


def _family(config: Mapping[str, Any], source: str) -> str:
    if not isinstance(config.get("chronos_config", {}), Mapping):
        raise CorruptCheckpointError(f"{source!r}: chronos_config is not an object.")
    try:
        return family_of(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source!r}: {error}") from None


@contextmanager
def _misfits(source: str) -> Iterator[None]:
    """What transformers, chronos and their validators raise on a bad config can be anything."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CorruptCheckpointError(
            f"{source!r}: the weights do not fit the config ({reason})."
        ) from error


def _model_class(config: Mapping[str, Any]) -> Any:
    """The class that wrote the checkpoint: an encoder alone must not gain a random decoder."""
    name = (config.get("architectures") or [""])[0]
    found = getattr(transformers, str(name), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModel


def model_name(source: str) -> str:
    """The Hub id, ``reference/...``, or the name of the directory."""
    path = Path(source).expanduser()
    return path.resolve().name if path.is_dir() else source


def _check_keys(model: nn.Module, stored: set[str], source: str) -> None:
    """transformers fills missing weights with random ones and only logs it; here it is an error."""
    # Old BERT checkpoints name the two weights of a LayerNorm as TensorFlow did.
    stored = {
        re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_LAYER_NORM[m[1]]}", key)
        for key in stored
    }
    by_storage: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_storage.setdefault(id(tensor), []).append(name)  # tied names share one parameter
    missing = [names[0] for names in by_storage.values() if not stored.intersection(names)]
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )
    known = {name for names in by_storage.values() for name in names}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    spare = sorted(
        key
        for key in stored - known
        if ".block." in key and not any(re.search(pattern, key) for pattern in ignored)
    )
    if spare:
        raise CorruptCheckpointError(
            f"{source!r} has {spare[0]!r} ({len(spare)} weights), which the config lacks."
        )


def _load_factored(
    source: str, directory: Path, config: Mapping[str, Any], dtype: torch.dtype | None
) -> LoadedModel:
    plan = read_plan(config, directory)
    base_config = config["base_config"]
    family = _family(base_config, source)
    kept_dtype = stored_dtype(directory)
    with _misfits(source):
        model = build_empty(family, base_config)
    apply_structure_(model, plan)
    load_weights_strictly_(model, directory / WEIGHTS_FILE)
    cast_parameters_(model, dtype or kept_dtype)
    with _misfits(source):
        pipeline = wrap_pipeline(family, model)
    return LoadedModel(
        model,
        pipeline,
        family,
        model_name(source),
        source,
        directory,
        kept_dtype,
        base_config,
        plan=plan,
    )


def build_empty(family: str, config: Mapping[str, Any]) -> nn.Module:
    """A model of ``config`` with parameters on the meta device: no memory, no initialisation."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    classes = {
        "chronos-t5": T5ForConditionalGeneration,
        "chronos-bolt": ChronosBoltModelForForecasting,
        "chronos-2": Chronos2Model,
    }
    if family == "chronos-2":
        hf_config = Chronos2Model.config_class(**settings)
    else:
        hf_config = AutoConfig.for_model("t5", **settings)
    with init_empty_weights(include_buffers=False):
        model: nn.Module = classes[family](hf_config)
    return model


def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of the weights and leave buffers alone: rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def wrap_pipeline(family: str, model: nn.Module) -> BaseChronosPipeline:
    """The stock pipeline of ``family`` around a model in memory."""
    if family == "chronos-t5":
        chronos_config = ChronosConfig(**model.config.chronos_config)  # type: ignore[union-attr, arg-type]
        return ChronosPipeline(
            tokenizer=chronos_config.create_tokenizer(),
            model=ChronosModel(config=chronos_config, model=model),
        )
    if family == "chronos-bolt":
        return ChronosBoltPipeline(model=model)
    return Chronos2Pipeline(model=model)
