"""Output of a pretraining: the verified model with its recipe and provenance."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from tscompress.checkpoints.format import unique_tensors, write_factored
from tscompress.checkpoints.locate import is_reference
from tscompress.checkpoints.names import CONFIG_FILE
from tscompress.checkpoints.provenance import write_provenance
from tscompress.compression.verify import verify
from tscompress.errors import OutputExistsError
from tscompress.families.registry import adapter_of_model
from tscompress.io.files import (
    check_file,
    check_output,
    new_directory,
    user_path,
    write_text_atomically,
)
from tscompress.io.network import is_repo_id
from tscompress.io.own_outputs import (
    RANKS_LOG,
    TRAINING_DIRECTORY,
    TRAINING_LOG,
    foreign_part,
)
from tscompress.plan.plan import Plan
from tscompress.training.checkpoint import STATE_FILE, STATE_FILES
from tscompress.training.pretrain_recipe import PRETRAIN_FILE, PretrainRecipe

#: Directory of the model, log, and directory of the training state, in that of a run.
MODEL, LOG_FILE, CHECKPOINT = "model", TRAINING_LOG, TRAINING_DIRECTORY
#: What a run writes besides models.
RUN_FILES = (LOG_FILE, RANKS_LOG, *(f"{CHECKPOINT}/{name}" for name in STATE_FILES))


def check_pretraining_output(
    recipe: PretrainRecipe,
    output: Path,
    inputs: Iterable[str | Path | None] = (),
    *,
    resume: bool = False,
    force: bool = False,
) -> None:
    """Refuse an output where a pretraining would replace another, what none wrote, or an input.

    Inputs are the models that the recipe names, and ``inputs`` besides. ``resume`` goes on with a
    run that is there, ``force`` begins anew.

    Raises
    ------
    OutputExistsError, OutputError
        As :func:`tscompress.io.files.check_output`.
    """
    inputs = *inputs, recipe.embedding_from, recipe.start_from
    check_no_state(output, allowed=resume or force)
    if not resume:
        check_output(output, force=force, inputs=inputs, writes=RUN_FILES, in_place=True)
    for name in RUN_FILES:
        check_file(output / name, force=True, inputs=inputs)
    models = [output / name for name in (MODEL, *map(snapshot_name, recipe.snapshot_steps))]
    for path in sorted({*models, *([] if resume else models_of_trainings(output))}):
        check_output(path, force=True, inputs=inputs)


def check_no_state(output: Path, *, allowed: bool) -> None:
    """Refuse to replace what another training saved; OutputExistsError."""
    if (output / CHECKPOINT / STATE_FILE).exists() and not allowed:
        raise OutputExistsError(
            f"{str(output)!r} holds the state of a training; resume it with --resume "
            "(resume=True), or start afresh with --force (force=True)."
        )


def models_of_trainings(output: Path) -> list[Path]:
    """Directories that trainings in ``output`` wrote their models into: those that begin anew go.

    One that holds something else, or was changed since, is not among them.
    """
    if not output.is_dir():
        return []
    names = re.compile(rf"{MODEL}|{snapshot_name(0)[:-1]}\d+")
    found = sorted(path for path in output.iterdir() if names.fullmatch(path.name))
    return [path for path in found if (path / PRETRAIN_FILE).is_file() and not foreign_part(path)]


def snapshot_name(step: int) -> str:
    """Of the model after ``step`` steps, in the directory of the run."""
    return f"step-{step}"


def write_model(
    model: PreTrainedModel,
    recipe: PretrainRecipe,
    path: Path,
    plan: Plan | None,
    parts: list[list[float]],
) -> None:
    """Write the model, its recipe and ``provenance.json``, replacing the directory in one step."""
    with new_directory(path, force=True) as directory:
        save_pretrained(model, directory, plan)
        _record(recipe, directory, parts)


def _record(recipe: PretrainRecipe, directory: Path, parts: list[list[float]]) -> None:
    """Write the recipe, which reproduces the model, and ``provenance.json``.

    If a resumed run changed the learning rate or number of steps, the latter has the first step,
    rate and steps in all of each part.
    """
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_text_atomically(directory / PRETRAIN_FILE, text)
    write_provenance(
        directory,
        {"model": None, "revision": None, "family": recipe.family, "sha256": {}},
        others=[directory / PRETRAIN_FILE],
        dtype="bfloat16",
        calibration={},
        recovery=None,
        pretraining={
            "steps": recipe.total_steps,
            "seed": recipe.seed,
            "embedding_from": recipe.embedding_from,
            "start_from": recipe.start_from,
            "start_revision": _commit_of(recipe.start_from),
            **({"parts": parts} if len(parts) > 1 else {}),
        },
    )


def _commit_of(source: str | None) -> str | None:
    """The commit of a start from the Hub, as the cache has it; None of any other."""
    if source is None or is_reference(source) or not is_repo_id(source):
        return None
    if user_path(source).is_dir():
        return None
    cached = try_to_load_from_cache(source, CONFIG_FILE)
    # Snapshots are cached under their commit: .../snapshots/<commit>.
    return Path(cached).parent.name if isinstance(cached, str) else None


def save_pretrained(model: PreTrainedModel, directory: Path, plan: Plan | None = None) -> None:
    """Write the weights in bfloat16 and a config for both old and new versions of transformers.

    With ``plan``, the head sizes of ``model``, a factored checkpoint that is loaded back and
    compared.

    Raises
    ------
    VerificationError
        The factored checkpoint does not load back bit-equal.
    """
    directory.mkdir(parents=True, exist_ok=True)
    half = copy.deepcopy(model).to(torch.bfloat16)
    for name in ("forward", "_original_forward"):  # of mixed precision, which a copy keeps
        vars(half).pop(name, None)
    half.config.dtype = torch.bfloat16
    if plan is not None:
        # Both names: transformers 4 reads torch_dtype, 5 reads dtype.
        dtypes = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        base_config = _completed(half, json.loads(half.config.to_json_string())) | dtypes
        write_factored(half, plan, base_config, directory)
        verify(half.eval().cpu(), directory)
        return
    half.save_pretrained(directory)
    path = directory / CONFIG_FILE
    config = _completed(half, json.loads(path.read_text()))
    config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _completed(model: PreTrainedModel, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with what another version of transformers reads differently."""
    return {**adapter_of_model(model).complete_config(model, config, unique_tensors(model).keys())}
