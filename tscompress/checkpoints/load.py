"""Reading checkpoints: Hub ids, directories, the shipped references, and what tscompress wrote."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from chronos import BaseChronosPipeline
from torch import nn

from tscompress.checkpoints.config_checks import check_config, check_generation
from tscompress.checkpoints.format import (
    CONFIG_FILE,
    INDEX_FILE,
    PLAN_FILE,
    WEIGHTS_FILE,
    apply_structure_,
    base_config_of,
    check_stored,
    is_factored_config,
    load_weights_strictly_,
    read_plan,
)
from tscompress.errors import (
    CorruptCheckpointError,
    ModelLoadError,
    ModelNotFoundError,
    OfflineError,
    UnsupportedModelError,
    UsageError,
)
from tscompress.families.registry import (
    FAMILIES,
    FORECAST_FAMILIES,
    adapter_of,
    build_empty,
    describe,
    family_of,
    wrap_pipeline,
)
from tscompress.families.stacks import LAYER_PREFIXES
from tscompress.families.t5_stack import tie_weights_
from tscompress.io.files import git_hash_of, sha256_of, user_path
from tscompress.io.hub_errors import reading_errors_in_words
from tscompress.io.network import (
    bounded_requests,
    is_network,
    is_passing,
    network_errors,
    status_of,
    with_retries,
)
from tscompress.io.untrusted import (
    StoredTensor,
    UnreadableFileError,
    leads_outside,
    read_header,
    read_json,
    shown,
    single_line,
)
from tscompress.plan.architecture import Architecture
from tscompress.plan.plan import Plan

PROVENANCE_FILE = "provenance.json"
GENERATION_FILE = "generation_config.json"
REFERENCE_PREFIX = "reference/"
_LAYER_NORM = {"gamma": "weight", "beta": "bias"}
#: Flipped bits make larger ones, and they make forecasts that are not finite.
_LARGEST_WEIGHT = 1e8
#: What from_pretrained calls it; chronos passes on what it does not know.
_DTYPE_ARGUMENT = (
    "dtype"
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
    else "torch_dtype"
)
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
            raise UnsupportedModelError(
                f"{self.name!r} is a {self.family} model, which does not forecast; "
                f"families that do: {', '.join(FORECAST_FAMILIES)}."
            )
        return self.pipeline


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are here and whose headers were read, but no weights yet.

    Attributes
    ----------
    source
        What :func:`find` was asked for.
    revision
        The commit that a Hub id resolved to.
    stored
        What the headers of the weight files declare.
    """

    source: str
    directory: Path
    revision: str | None
    config: Mapping[str, Any] = field(repr=False)
    stored: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def is_factored(self) -> bool:
        return is_factored_config(self.config)

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.stored.values())

    @property
    def bytes_on_disk(self) -> int:
        """Of all weight files."""
        return sum(path.stat().st_size for path in weight_files(self.directory))


def find(model: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Look a checkpoint up, download it if need be, and read config and headers.

    Takes and raises what :func:`load` does.
    """
    source = str(model)
    directory, commit = _locate(source, revision)
    try:
        _check_files(directory, source)
        config = read_config(directory, source)
        stored = stored_tensors(directory, source)
    except PermissionError as error:
        raise ModelLoadError(
            f"{source!r}: {error.filename} may not be read (permission denied)."
        ) from None
    return Checkpoint(source, directory, commit, config, stored)


def load(
    model: str | Path | Checkpoint,
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
        or the output of ``tscompress compress``. Or what :func:`find` found.
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
    device = _check_device(device)
    target_dtype = _resolve_dtype(dtype)
    found = model if isinstance(model, Checkpoint) else find(model, revision=revision)
    parts = found.source, found.directory, found.config, found.stored, target_dtype
    loaded = _load_factored(*parts) if found.is_factored else _load_stock(*parts)
    loaded.revision = found.revision
    _check_finite(loaded.model, found.source)
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
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~somebody
        raise ModelNotFoundError(f"there is no directory {source!r}: no such user.") from None
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"{source!r} is a directory; a revision goes with a Hub id only.")
        return path, None
    if revision is not None and not revision.strip():
        raise UsageError(f"{revision!r} is no revision; give a branch, tag or commit, or none.")
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
    from huggingface_hub import constants, snapshot_download

    def fetch() -> Path:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))

    with bounded_requests(constants.HF_HUB_ETAG_TIMEOUT), reading_errors_in_words(source, revision):
        directory = with_retries(fetch, retry_on=_worth_another_look)
        if damaged := _remove_damaged_files(directory, source):
            try:
                directory = fetch()
            except network_errors() as error:
                if not (is_network(error) or isinstance(error, FileNotFoundError)):
                    raise
                raise OfflineError(
                    f"{source!r}: {damaged[0]} in the local cache was damaged and is removed, and "
                    "the Hub cannot be reached for another one; connect, or give a directory."
                ) from None
            if damaged := _remove_damaged_files(directory, source):
                raise CorruptCheckpointError(
                    f"{source!r}: {damaged[0]} arrived twice with another hash than the Hub "
                    "announced; nothing of it was kept: try again."
                )
    _check_recorded_files(directory, source)
    # snapshots are cached under their commit: .../snapshots/<commit>
    return directory, directory.name


def _worth_another_look(error: BaseException) -> bool:
    """What passes and huggingface_hub has not retried: it does with 429, but for the first look."""
    from huggingface_hub.errors import HfHubHTTPError

    return is_passing(error) and not (isinstance(error, HfHubHTTPError) and status_of(error) == 429)


def _remove_damaged_files(directory: Path, source: str) -> list[str]:
    """Remove from the cache what has another hash than the Hub announced, and name it.

    huggingface_hub compares only sizes.
    """
    hash_by_length = {64: sha256_of, 40: git_hash_of}  # of large files, of others
    announced = _announced_hashes(directory, source)
    damaged = []
    for path in sorted(directory.iterdir()):
        expected = announced.get(path.name, "")
        hash_of = hash_by_length.get(len(expected))
        if hash_of is None or not path.is_file() or hash_of(path) == expected:
            continue
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        damaged.append(path.name)
    return damaged


def _announced_hashes(directory: Path, source: str) -> dict[str, str]:
    """File name to the hash that the Hub announced: SHA-256 of large files, git's of others.

    A cache of links has them as the names of what they lead to. One without, where the system has
    none, does not keep them, and the Hub is asked again; without a network nothing is known there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    paths = list(directory.iterdir())
    known = {path.name: path.resolve().name for path in paths if path.is_symlink()}
    if len(known) < len(paths):
        try:
            listed = list(HfApi().list_repo_tree(source, revision=directory.name))
        except network_errors() as error:
            if not is_network(error):
                raise
            return known
        for entry in listed:
            if isinstance(entry, RepoFile):
                known[entry.path] = entry.lfs.sha256 if entry.lfs else entry.blob_id
    return {name: value for name, value in known.items() if re.fullmatch("[0-9a-f]+", value)}


def _check_recorded_files(directory: Path, source: str) -> None:
    """Compare what was downloaded with what provenance.json, if there is one, says was written.

    Raises
    ------
    CorruptCheckpointError
    """
    try:
        record = read_json(directory / PROVENANCE_FILE)["sha256"]
        recorded = {str(name): str(value) for name, value in record.items()}
    except (FileNotFoundError, UnreadableFileError, KeyError, TypeError, AttributeError):
        return
    for path in [*source_files(directory), directory / PLAN_FILE]:
        expected = recorded.get(path.name)
        if expected is not None and path.is_file() and sha256_of(path) != expected:
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} is not what tscompress wrote (sha256 in "
                f"{PROVENANCE_FILE}); it was changed or damaged: ask its author."
            )


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
    path = directory / CONFIG_FILE
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no config.json; is it a checkpoint?") from None
    except UnreadableFileError as error:
        raise CorruptCheckpointError(
            f"{source!r}: config.json cannot be read as JSON: {error}."
        ) from None
    if not isinstance(config, dict):
        raise CorruptCheckpointError(f"{source!r}: config.json is not an object.")
    return config


def _check_generation_file(directory: Path, config: Mapping[str, Any], source: str) -> None:
    try:
        settings = read_json(directory / GENERATION_FILE)
    except FileNotFoundError:
        return
    except UnreadableFileError as error:
        raise CorruptCheckpointError(
            f"{source!r}: {GENERATION_FILE} cannot be read as JSON: {error}."
        ) from None
    check_generation(settings, source, int(config.get("vocab_size", 0)))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from the index if it is sharded."""
    index = directory / INDEX_FILE
    single = directory / WEIGHTS_FILE
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    try:
        names = set(read_json(index)["weight_map"].values())
        outside = any(Path(name).name != name for name in names)
        others = not names or any(Path(name).suffix != ".safetensors" for name in names)
    except (UnreadableFileError, KeyError, AttributeError, TypeError):
        raise CorruptCheckpointError(f"{str(index)!r} is not a safetensors index.") from None
    if outside:
        raise CorruptCheckpointError(f"{str(index)!r} points outside its directory.")
    if others:
        raise CorruptCheckpointError(f"{str(index)!r} names files that are not safetensors.")
    return [directory / name for name in sorted(names)]


def source_files(directory: Path) -> list[Path]:
    """The files of a checkpoint that determine what it forecasts: its configs and its weights."""
    names = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE)
    configs = [directory / name for name in names if (directory / name).is_file()]
    return [*configs, *weight_files(directory)]


def _check_files(directory: Path, source: str) -> None:
    """Refuse links that lead elsewhere, and adapters, whose weights are on top of other ones."""
    for path in directory.iterdir():
        if path.suffix in (".json", ".safetensors", ".yaml") and leads_outside(path):
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} is a link out of the directory; copy the file there."
            )
        if path.name == "adapter_config.json":
            raise UnsupportedModelError(
                f"{source!r} is an adapter; merge it into its model and save that."
            )


def stored_tensors(directory: Path, source: str) -> dict[str, StoredTensor]:
    """What the headers of all weight files declare, held against the files' sizes.

    Raises
    ------
    ModelNotFoundError, UnsupportedModelError
        There are no weights, or only pickled ones.
    CorruptCheckpointError
        A file is missing, truncated, or its header lies.
    """
    found = weight_files(directory)
    if not found:
        pickles = sorted(p.name for p in directory.glob("*.bin"))
        if pickles:
            raise UnsupportedModelError(
                f"{source!r} has only pickled weights ({pickles[0]}); tscompress reads safetensors "
                "alone and never unpickles. Save the model again with safe_serialization=True."
            )
        raise ModelNotFoundError(f"{source!r} has no {WEIGHTS_FILE}.")
    tensors: dict[str, StoredTensor] = {}
    for path in found:
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{source!r} lacks {path.name}.") from None
        except UnreadableFileError as error:
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} is truncated or damaged ({error}); fetch it again."
            ) from None
        if twice := tensors.keys() & header.keys():
            raise CorruptCheckpointError(
                f"{source!r} has {single_line(min(twice))!r} in two files, one {path.name}; "
                "fetch it again."
            )
        tensors |= header
    return tensors


def stored_dtype(directory: Path) -> torch.dtype:
    """The floating-point dtype of most stored tensors; raises as :func:`stored_tensors`."""
    return _most_common_dtype(stored_tensors(directory, str(directory)))


def _most_common_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype:
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    counts = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in names)
    return names[counts.most_common(1)[0][0]] if counts else torch.float32


def _check_finite(model: nn.Module, source: str) -> None:
    for name, parameter in model.named_parameters():
        low, high = (float(bound) for bound in torch.aminmax(parameter.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):  # aminmax passes NaN on
            raise CorruptCheckpointError(f"{source!r}: {name} has values that are not finite.")
        if max(-low, high) > _LARGEST_WEIGHT:
            raise CorruptCheckpointError(
                f"{source!r}: {name} has a value of {max(-low, high):.3g}, which no trained "
                "network has; fetch the checkpoint again."
            )


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
    source: str,
    directory: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> LoadedModel:
    name = family_name(config, source)
    family = FAMILIES[name]
    forecasts = name in FORECAST_FAMILIES
    check_config(config, source, len(stored), generates=forecasts)
    if forecasts:
        _check_generation_file(directory, config, source)
    with _misfits(source):
        empty = family.empty_model(config)
        tie_weights_(empty)
    if family.names_kept:
        _check_fits(empty, stored, source)
    else:
        _check_count(empty, stored, source)
    kept_dtype = _most_common_dtype(stored)
    # A .bin file beside the weights is never an alternative.
    options = {_DTYPE_ARGUMENT: dtype or kept_dtype, "use_safetensors": True}
    pipeline = None
    with _misfits(source):
        if forecasts:
            pipeline = BaseChronosPipeline.from_pretrained(directory, **options)
            model = pipeline.inner_model
        else:
            model, info = family.model_class(config).from_pretrained(
                directory, trust_remote_code=False, output_loading_info=True, **options
            )
    if pipeline is None:
        _check_complete(info, source)
    else:
        try:
            config = adapter_of(name).complete_config(model, config, stored.keys())
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{source!r}: {error}") from None
    return LoadedModel(
        model, pipeline, name, model_name(source), source, directory, kept_dtype, config
    )


def family_name(config: Mapping[str, Any], source: str) -> str:
    """Name of the family of a ``config.json``.

    Raises
    ------
    CorruptCheckpointError
        Its ``chronos_config`` is not an object.
    UnsupportedModelError
        No family recognises it.
    """
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
        raise CorruptCheckpointError(
            f"{source!r}: the weights do not fit the config ({single_line(error)})."
        ) from error


def model_name(source: str) -> str:
    """The Hub id, ``reference/...``, or the name of the directory."""
    path = user_path(source)
    return path.resolve().name if path.is_dir() else source


def _check_fits(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Hold the headers against an empty model, before any memory is given to weights.

    transformers fills missing weights with random ones and only logs it; here it is an error.
    """
    # Old BERT checkpoints name the two weights of a LayerNorm as TensorFlow did.
    found = {
        re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_LAYER_NORM[m[1]]}", key): tensor
        for key, tensor in stored.items()
    }
    by_storage: dict[int, list[str]] = {}
    expected = model.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        by_storage.setdefault(id(tensor), []).append(name)  # tied names share one parameter
    missing = [names[0] for names in by_storage.values() if not found.keys() & set(names)]
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    spare = sorted(
        key
        for key in found.keys() - expected.keys()
        if key.startswith(LAYER_PREFIXES)
        and not any(re.search(pattern, key) for pattern in ignored)
    )
    if spare:
        raise CorruptCheckpointError(
            f"{source!r} has {shown(spare[0])} ({len(spare)} weights), which the config lacks."
        )
    for name, tensor in expected.items():
        if name in found:
            check_stored(name, found[name], tensor, source)


def _check_count(model: nn.Module, stored: Mapping[str, StoredTensor], source: str) -> None:
    """Refuse a config of a larger model than the headers have weights for.

    Of families whose checkpoints name weights otherwise, see :func:`_check_complete`.
    """
    asked = sum(parameter.numel() for parameter in model.parameters())
    found = sum(math.prod(tensor.shape) for tensor in stored.values())
    if asked > found:
        raise CorruptCheckpointError(
            f"{source!r} lacks weights: the config asks for {asked:,}, the files hold {found:,}."
        )


def _check_complete(info: Mapping[str, Any], source: str) -> None:
    """Refuse a model some of whose weights transformers drew, having found none."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise CorruptCheckpointError(
            f"{source!r} lacks {missing[0]!r} ({len(missing)} weights missing)."
        )


def _load_factored(
    source: str,
    directory: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype | None,
) -> LoadedModel:
    plan = read_plan(config, directory)
    base_config = base_config_of(config)
    family = family_name(base_config, source)
    if family not in FORECAST_FAMILIES:
        raise UnsupportedModelError(f"{source!r}: there are no factored {family} checkpoints.")
    check_config(base_config, source, len(stored))
    _check_generation_file(directory, base_config, source)
    kept_dtype = _most_common_dtype(stored)
    with _misfits(source):
        model = build_empty(family, base_config)
    apply_structure_(model, plan)
    load_weights_strictly_(model, weight_files(directory))
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


def cast_parameters_(model: nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of the weights and leave buffers alone: rotary frequencies stay float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
