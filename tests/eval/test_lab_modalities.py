"""Models of other modalities: their files are read whole or refused, and embeddings are as told."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_scripts import imported

from tscompress.checkpoints.load import load
from tscompress.errors import DataError, UsageError
from tscompress.linalg import epsilon_rank, singular_values

MODULES = ("verdicts", "ctranslate2_weights", "modality_models", "modality_training",
           "modality_toys", "modality_tabular", "modality_inputs", "modality_embeddings",
           "modality_weights", "modality_text")  # fmt: skip
WIDTH, HEADS, LAYERS = 8, 2, 1


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with imported(MODULES) as found:
        yield found


# --------------------------------------------------------------------------------------------------
# Weights of CTranslate2
# --------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def variable(name: str, array: np.ndarray) -> bytes:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
    shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
    kind = struct.pack("<BI", kinds[array.dtype.name], array.nbytes)
    return text(name) + shape + kind + array.tobytes()


def model_file(
    arrays: Mapping[str, np.ndarray],
    aliases: Mapping[str, str] | None = None,
    version: int = 6,
) -> bytes:
    parts = [struct.pack("<I", version), text("WhisperSpec"), struct.pack("<II", 3, len(arrays))]
    parts += [variable(name, array) for name, array in arrays.items()]
    parts.append(struct.pack("<I", len(aliases or {})))
    parts += [text(one) + text(name) for one, name in (aliases or {}).items()]
    return b"".join(parts)


SMALL = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array(4, dtype=np.int16)}


def test_variables_and_aliases_are_read(lab: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(model_file(SMALL, {"c": "a"}))
    found = lab.ctranslate2_weights.read_weights(path)
    assert list(found) == ["a", "b", "c"]
    assert np.array_equal(found["a"], SMALL["a"])
    assert int(found["b"]) == 4
    assert found["c"] is found["a"]


def test_every_cut_is_refused(lab: Any, tmp_path: Path) -> None:
    whole, path = model_file(SMALL, {"c": "a"}), tmp_path / "model.bin"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            lab.ctranslate2_weights.read_weights(path)


BROKEN = {
    "version": model_file(SMALL, version=5),
    "behind the end": model_file(SMALL) + b"x",
    "alias of nothing": model_file(SMALL, {"c": "none"}),
    "alias of itself": model_file(SMALL, {"a": "b"}),
    "type": model_file(SMALL).replace(struct.pack("<BI", 4, 12), struct.pack("<BI", 9, 12)),
    "size": model_file(SMALL).replace(struct.pack("<BI", 4, 12), struct.pack("<BI", 4, 8)),
    "huge": model_file(SMALL).replace(
        struct.pack("<B2I", 2, 2, 3), struct.pack("<B2I", 2, 2**31, 2**31)
    ),
    "dimensions": model_file(SMALL).replace(struct.pack("<B2I", 2, 2, 3), b"\xff" * 9),
    "name": model_file(SMALL).replace(text("a"), b"\x02\x00\xff\x00"),
    "names": model_file({"a": SMALL["a"]})[:-4] + variable("a", SMALL["a"]),
    "nothing": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_broken_files_are_refused_by_name(lab: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.bin"):
        lab.ctranslate2_weights.read_weights(path)


def test_missing_files_and_directories_are_refused(lab: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=path.name):
            lab.ctranslate2_weights.read_weights(path)


def whisper_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Of a tiny Whisper, by the names of CTranslate2."""
    random = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float16)

    def block(name: str, *sizes: int) -> dict[str, np.ndarray]:
        found = {f"{name}/layer_norm/{part}": weight(WIDTH) for part in ("gamma", "beta")}
        for index, size in enumerate(sizes):
            inner = sizes[0] if index and name.endswith("ffn") else WIDTH
            found[f"{name}/linear_{index}/weight"] = weight(size, inner)
            found[f"{name}/linear_{index}/bias"] = weight(size)
        return found

    arrays = {"decoder/embeddings/weight": weight(20, WIDTH)}
    for index, channels in enumerate((4, WIDTH)):
        arrays[f"encoder/conv{index + 1}/weight"] = weight(WIDTH, channels, 3)
        arrays[f"encoder/conv{index + 1}/bias"] = weight(WIDTH)
    for stack in ("encoder", "decoder"):
        arrays |= {f"{stack}/layer_norm/{part}": weight(WIDTH) for part in ("gamma", "beta")}
        arrays[f"{stack}/position_encodings/encodings"] = weight(6, WIDTH)
        arrays[f"{stack}/num_heads"] = np.array(HEADS, dtype=np.int16)
        for layer in range(LAYERS):
            name = f"{stack}/layer_{layer}"
            arrays |= block(f"{name}/ffn", 12, WIDTH)
            arrays |= block(f"{name}/self_attention", 3 * WIDTH, WIDTH)
            if stack == "decoder":
                arrays |= block(f"{name}/attention", WIDTH, 2 * WIDTH, WIDTH)
    return arrays


def test_whisper_is_taken_apart_into_its_projections(lab: Any, tmp_path: Path) -> None:
    arrays = whisper_arrays()
    (tmp_path / "model.bin").write_bytes(model_file(arrays))
    lab.modality_models.whisper_of(tmp_path / "model.bin").save_pretrained(tmp_path / "whisper")
    model: Any = load(tmp_path / "whisper").model
    fused = torch.from_numpy(arrays["decoder/layer_0/self_attention/linear_0/weight"]).float()
    layer = model.decoder.layers[0]
    for index, name in enumerate("qkv"):
        part = getattr(layer.self_attn, f"{name}_proj").weight
        assert torch.equal(part, fused[index * WIDTH : (index + 1) * WIDTH])
    values = torch.from_numpy(arrays["decoder/layer_0/attention/linear_1/bias"]).float()
    assert torch.equal(layer.encoder_attn.v_proj.bias, values[WIDTH:])
    outputs = torch.from_numpy(arrays["decoder/layer_0/attention/linear_2/weight"]).float()
    assert torch.equal(layer.encoder_attn.out_proj.weight, outputs)


def test_a_missing_weight_of_whisper_is_named(lab: Any, tmp_path: Path) -> None:
    arrays = whisper_arrays()
    arrays["decoder/layer_0/ffn/linear_1/bias"] = np.zeros(WIDTH + 1, dtype=np.float16)
    (tmp_path / "model.bin").write_bytes(model_file(arrays))
    with pytest.raises(DataError, match="fc2"):
        lab.modality_models.whisper_of(tmp_path / "model.bin")


# --------------------------------------------------------------------------------------------------
# Wheels
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minilm", "whisper", "vit"])
def test_a_missing_wheel_names_the_extra(
    lab: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.modality_models, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"tscompress\[lab\]"):
        lab.modality_models.model_directory(name)


def test_spectra_need_all_wheels_before_anything_is_trained(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = lab.modality_models.find_spec("numpy")
    monkeypatch.setattr(
        lab.modality_models, "find_spec", lambda name: None if name == "fracast" else found
    )
    monkeypatch.setattr(lab.modality_embeddings, "all_rows", lambda _: pytest.fail("measures"))
    with pytest.raises(UsageError, match="fracast"):
        lab.modality_embeddings.spectra(True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("minilm", "encoder"), ("vit", "encoder"), ("whisper", "encoder"), ("whisper", "decoder"),
     ("whisper", "cross")],
)  # fmt: skip
def test_ranks_of_the_wheels_are_known(lab: Any, name: str, kind: str, tmp_path: Path) -> None:
    try:
        directory = lab.modality_models.model_directory(name, tmp_path)
    except UsageError as error:
        pytest.skip(str(error))  # names the extra
    loaded = load(directory)
    ranks = [
        epsilon_rank(singular_values(weight_of(loaded.model, block.projections["q"])), 0.1)
        for block in loaded.architecture.attention
        if block.kind == kind
    ]
    assert ranks == list(lab.modality_weights.GOLDEN[name, kind])


def weight_of(model: Any, name: str) -> torch.Tensor:
    return model.get_submodule(name).weight.detach().double()


# --------------------------------------------------------------------------------------------------
# Embeddings
# --------------------------------------------------------------------------------------------------


def test_wavelets_keep_lengths_and_put_a_constant_into_the_approximation(lab: Any) -> None:
    series = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = lab.modality_toys.haar(series)
    assert found.shape == series.shape
    assert torch.allclose(found.norm(dim=1), series.norm(dim=1))
    constant = lab.modality_toys.haar(torch.ones(1, 64))
    assert torch.allclose(constant[:, :8], torch.full((1, 8), math.sqrt(8)))
    assert torch.allclose(constant[:, 8:], torch.zeros(1, 56), atol=1e-6)


@pytest.mark.parametrize("kind", ["tokens", "wavelet tokens", "gated value", "patches"])
def test_a_toy_learns_and_is_kept(lab: Any, kind: str, tmp_path: Path) -> None:
    toys = lab.modality_toys
    untrained, trained = toys.Toy(kind), toys.trained_toy(kind, 2, tmp_path)
    again = toys.trained_toy(kind, 2, tmp_path)
    series = toys.training_series(2, 64, torch.Generator().manual_seed(0))
    vectors = trained.embedded(series)
    assert torch.equal(vectors, again.embedded(series))
    assert not torch.equal(vectors, untrained.embedded(series))
    assert vectors.shape == (2, 64 // (32 if kind == "patches" else 1), toys.D_MODEL)


def test_cells_have_rank_two_and_rows_that_of_their_features(lab: Any) -> None:
    tabular = lab.modality_tabular
    model = tabular.TabularClassifier()
    cells, labels = tabular.random_tables(64, torch.Generator().manual_seed(0))
    assert labels.double().mean() == 0.5
    cell = torch.nn.Linear(1, 32)(cells.flatten()[:, None]).double()
    assert epsilon_rank(lab.modality_embeddings.spectrum(cell), 1e-5) == 2
    rows = model.embedded(cells, labels).flatten(0, 1).double()
    rank = epsilon_rank(lab.modality_embeddings.spectrum(rows), 1e-5)
    # Features, and what a row without a label, with label 0 and with label 1 is moved by.
    assert rank == tabular.FEATURES + 3


def test_queries_do_not_change_each_other(lab: Any) -> None:
    tabular = lab.modality_tabular
    model = tabular.TabularClassifier().eval()
    cells, labels = tabular.random_tables(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(cells, labels)
        cells[:, -1] += 1
        after = model(cells, labels)
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-6)
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_spectra_are_those_of_the_svd(lab: Any) -> None:
    for shape in ((9, 5), (5, 9)):
        rows = torch.randn(shape, dtype=torch.float64)
        found = lab.modality_embeddings.spectrum(rows)
        assert torch.allclose(found, torch.linalg.svdvals(rows))


def test_overlap_of_sets_of_ten(lab: Any) -> None:
    some = torch.arange(10)[None]
    assert lab.modality_text.overlap(some, some.flip(1)) == 1
    assert lab.modality_text.overlap(some, some + 10) == 0
    assert lab.modality_text.overlap(some, some + 5) == pytest.approx(5 / 15)


def test_sentences_are_the_same_everywhere_and_distinct(lab: Any) -> None:
    found = lab.modality_inputs.sentences(50)
    assert len(set(found)) == 50
    assert all(40 <= len(one) <= 300 for one in found)
