"""What enters the first layer of models of time series, text, images and tables: rows of numbers.

Signals are sinusoids, exponentials and white noise, a third each, as the paper has. Text is the
help on Python's topics (`pydoc_data`, English prose that every CPython has) in place of a novel.
Images are crops of a photograph of matplotlib and of two of scikit-learn, in place of CIFAR-10.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from modality_models import model_directory
from modality_tabular import (
    FEATURES,
    TabularClassifier,
    random_tables,
    trained_classifier,
)
from modality_toys import Toy, trained_toy
from PIL import Image
from torch import Tensor, nn
from transformers import BertTokenizerFast

from tscompress.checkpoints.load import LoadedModel, cast_parameters_, load
from tscompress.errors import UsageError
from tscompress.families.registry import FAMILIES
from tscompress.io.files import cache_directory
from tscompress.linalg import even_picks

MOST_ROWS = 8192
LENGTH = 512
TOY_STEPS = {"patches": 1000, "gated value": 300, "wavelet tokens": 300, "tokens": 300}
TABULAR_STEPS = 150
#: Fewer, for a look.
QUICK_STEPS = 20


class Rows(NamedTuple):
    """What enters the first layer: as it is embedded, and after the layer's own norm.

    Attributes
    ----------
    embedded, fed
        ``[N, d]`` in float64; ``fed`` is None where there is no such norm.
    """

    modality: str
    model: str
    inputs: str
    embedded: Tensor
    fed: Tensor | None = None


def some(rows: Tensor) -> Tensor:
    """At most 8192 of the rows ``[..., d]``, evenly, in float64."""
    flat = rows.detach().reshape(-1, rows.shape[-1])
    return flat[even_picks(len(flat), MOST_ROWS)].double()


# --------------------------------------------------------------------------------------------------
# Inputs
# --------------------------------------------------------------------------------------------------


def signals(each: int, length: int = LENGTH) -> Tensor:
    """Sinusoids, exponentials and white noise, ``[3 each, length]``."""
    time = torch.arange(length)[None, :]
    frequency = torch.logspace(math.log10(1 / length), math.log10(0.45), each)[:, None]
    rate = torch.linspace(-5, 5, each)[:, None] / length
    noise = torch.randn(each, length, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.sin(2 * math.pi * frequency * time), torch.exp(rate * time), noise])


def scaled(series: Tensor) -> Tensor:
    """In units of mean size, as the toys read series."""
    return series / series.abs().mean(1, keepdim=True).clamp_min(1e-3)


@cache
def sentences(number: int) -> tuple[str, ...]:
    """English sentences of 40 to 300 letters."""
    from pydoc_data.topics import topics

    prose = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    found = [one.strip() for one in re.split(r"(?<=[a-z)]\.) (?=[A-Z])", prose)]
    kept = [one for one in dict.fromkeys(found) if 40 <= len(one) <= 300]
    return tuple(kept[pick] for pick in even_picks(len(kept), number).tolist())


def photographs() -> list[Image.Image]:
    """One of matplotlib, two of scikit-learn.

    Raises
    ------
    UsageError
        scikit-learn is not installed.
    """
    import matplotlib

    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("photographs need scikit-learn; pip install 'tscompress[lab]'.")
    theirs = Path(spec.submodule_search_locations[0]) / "datasets" / "images"
    own = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    paths = (own, theirs / "china.jpg", theirs / "flower.jpg")
    return [Image.open(path).convert("RGB") for path in paths]


def crops(number: int, side: int) -> Tensor:
    """Random crops of ``side`` pixels, enlarged to 224: ``[B, 3, 224, 224]``, normalised."""
    pictures, random = photographs(), np.random.default_rng(0)
    found = []
    for index in range(number):
        picture = pictures[index % len(pictures)]
        left, top = (int(random.integers(0, size - side + 1)) for size in picture.size)
        crop = picture.crop((left, top, left + side, top + side))
        found.append(np.asarray(crop.resize((224, 224), Image.Resampling.BICUBIC)))
    return normalised(torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2) / 255.0)


def noise_images(number: int) -> Tensor:
    """Independent uniform pixels, ``[B, 3, 224, 224]``."""
    random = torch.Generator().manual_seed(0)
    return normalised(torch.rand(number, 3, 224, 224, generator=random))


def normalised(images: Tensor) -> Tensor:
    """By the means and deviations of ImageNet, as the model was trained."""
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (images - mean[:, None, None]) / deviation[:, None, None]


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


@cache
def opened(name: str) -> LoadedModel:
    """A reference model, or ``minilm``, ``whisper``, ``vit`` of the wheels, in float32."""
    loaded = load(name if name.startswith("reference/") else str(model_directory(name)))
    cast_parameters_(loaded.model, torch.float32)
    return loaded


def toy(kind: str, quick: bool) -> Toy:
    """A toy after its training, kept in the cache."""
    return trained_toy(kind, QUICK_STEPS if quick else TOY_STEPS[kind], cache_directory() / "lab")


def classifier(quick: bool) -> TabularClassifier:
    """The tabular model after its training, kept in the cache."""
    return trained_classifier(QUICK_STEPS if quick else TABULAR_STEPS, cache_directory() / "lab")


@torch.no_grad()
def bolt_rows(series: Tensor, name: str = "reference/bolt") -> Rows:
    """Patches of 16 values through the residual MLP of a Chronos-Bolt."""
    loaded: Any = opened(name)
    features, observed = FAMILIES[loaded.family].patch_features(loaded.model, series)
    vectors = loaded.model.input_patch_embedding(features)[observed]
    norm = loaded.model.encoder.block[0].layer[0].layer_norm
    return Rows("time series", name, "signals, k = 16", some(vectors), some(norm(vectors)))


@torch.no_grad()
def t5_rows(series: Tensor, name: str = "reference/t5") -> Rows:
    """Tokens of values through the table of a Chronos-T5."""
    loaded: Any = opened(name)
    ids, mask, _ = loaded.forecaster.tokenizer.context_input_transform(series)
    vectors = loaded.model.get_input_embeddings()(ids[mask])
    norm = loaded.model.encoder.block[0].layer[0].layer_norm
    return Rows("time series", name, "signals, k = 1", some(vectors), some(norm(vectors)))


@torch.no_grad()
def toy_rows(model: Toy, series: Tensor, label: str) -> Rows:
    """Through the embedding of a toy, and the norm of its first layer."""
    vectors = model.embedded(scaled(series))
    norm = model.layers.layers[0].norm1
    return Rows("time series", label, "signals", some(vectors), some(norm(vectors)))


@torch.no_grad()
def fracast_rows(series: Tensor) -> Rows:
    """Through the first projection of Fracast-0, which has no attention."""
    from fracast_pipeline import load_fracast

    forecaster = load_fracast().forecaster
    found: list[Tensor] = []
    module = next(m for n, m in forecaster.inner_model.named_modules() if n.endswith("in_proj"))

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        found.append(output.transpose(1, 2) if isinstance(module, nn.Conv1d) else output)

    handle = module.register_forward_hook(keep)
    try:
        forecaster.predict(series, prediction_length=48)
    finally:
        handle.remove()
    return Rows("time series", "Fracast-0", "signals, k = 1", some(torch.cat(found)))


@torch.no_grad()
def minilm_rows(number: int) -> Iterator[Rows]:
    """Text as fed, padding left out, and every distinct piece of it once."""
    model: Any = opened("minilm").model
    tokens = tokenizer()(list(sentences(number)), padding=True, return_tensors="pt")
    ids, real = tokens["input_ids"], tokens["attention_mask"].bool()
    summed: list[Tensor] = []
    norm = model.embeddings.LayerNorm
    handle = norm.register_forward_pre_hook(lambda _, given: summed.append(given[0]))
    fed = model.embeddings(input_ids=ids)[real]
    handle.remove()
    yield Rows("text", "MiniLM", "text", some(summed[0][real]), some(fed))
    table = model.embeddings.word_embeddings.weight[ids[real].unique()]
    yield Rows("text", "MiniLM", "distinct words", some(table))


@cache
def tokenizer() -> Any:
    """That of MiniLM."""
    return BertTokenizerFast.from_pretrained(model_directory("minilm"))


@torch.no_grad()
def whisper_rows() -> Rows:
    """The table of Whisper's decoder, and after the norm of the first layer, at one position."""
    model: Any = opened("whisper").model
    table = model.decoder.embed_tokens.weight
    fed = model.decoder.layers[0].self_attn_layer_norm(
        table + model.decoder.embed_positions.weight[1]
    )
    return Rows("text", "Whisper, decoder", "all tokens", some(table), some(fed))


@torch.no_grad()
def vit_rows(images: Tensor, inputs: str) -> Rows:
    """Patches with their positions, without the class token."""
    model: Any = opened("vit").model
    vectors = model.embeddings(images)[:, 1:]
    fed = model.encoder.layer[0].norm1(vectors)
    return Rows("images", "ViT-S", inputs, some(vectors), some(fed))


@torch.no_grad()
def tabular_rows(quick: bool) -> Iterator[Rows]:
    """Cells through a linear map of one number, rows as tokens, and what the second layer reads."""
    cells, labels = random_tables(16 if quick else 114, torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = classifier(quick)
    cell = nn.Linear(1, model.row.out_features)
    yield Rows("tables", "Linear(1, d), as Mitra", "cells", some(cell(cells.flatten()[:, None])))
    rows = model.embedded(cells, labels)
    norms = model.layers.layers[0].norm1, model.layers.layers[1].norm1
    yield Rows("tables", "ours", f"rows of {FEATURES} cells", some(rows), some(norms[0](rows)))
    later = model.layers.layers[0](rows, src_mask=model.mask(cells.shape[1]))
    yield Rows("tables", "ours", "rows, after a layer", some(later), some(norms[1](later)))


TOY_NAMES = {
    "tokens": "toy Chronos",
    "wavelet tokens": "toy WaveToken",
    "gated value": "toy Time-MoE",
    "patches": "toy TimesFM",
}


def all_rows(quick: bool) -> Iterator[Rows]:
    """Every model of the comparison; `quick` has an eighth of the inputs."""
    share = 8 if quick else 1
    yield bolt_rows(signals(96 // share))
    yield t5_rows(signals(6))
    for kind, name in TOY_NAMES.items():
        length = 96 // share if kind == "patches" else 6
        yield toy_rows(Toy(kind).eval(), signals(length), f"{name}, untrained")
        yield toy_rows(toy(kind, quick), signals(length), f"{name}, trained")
    yield fracast_rows(signals(6))
    yield from minilm_rows(400 // share)
    yield whisper_rows()
    makers: dict[str, Callable[[], Tensor]] = {
        "crops of 224 pixels": lambda: crops(32 // share, 224),
        "crops of 32, enlarged": lambda: crops(32 // share, 32),
        "white noise": lambda: noise_images(32 // share),
    }
    for name, make in makers.items():
        yield vit_rows(make(), name)
    yield from tabular_rows(quick)
