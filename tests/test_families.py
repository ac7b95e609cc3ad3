"""Model families: what adapters say of models, and families for profiling only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Dinov2Config,
    Dinov2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperModel,
)

from tscompress.checkpoints.load import load
from tscompress.cli import app as cli
from tscompress.errors import CorruptCheckpointError, UnsupportedModelError
from tscompress.families.registry import adapter_of, adapter_of_pipeline, describe
from tscompress.profiling.figures import save_profile_figures
from tscompress.profiling.measure import profile, weight_matrix

WIDTH, HEADS, LAYERS, UNITS = 16, 2, 3, 40


def vit_config() -> ViTConfig:
    return ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=UNITS,
        image_size=16,
        patch_size=4,
    )


def dinov2_config(*, gated: bool = False) -> Dinov2Config:
    return Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        mlp_ratio=2,
        image_size=16,
        patch_size=4,
        use_swiglu_ffn=gated,
    )


def whisper_config() -> WhisperConfig:
    return WhisperConfig(
        vocab_size=50,
        d_model=WIDTH,
        num_mel_bins=4,
        encoder_layers=LAYERS,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=UNITS,
        decoder_ffn_dim=UNITS,
        max_source_positions=8,
        max_target_positions=8,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        # What the released checkpoints have; nothing is generated with a profile.
        suppress_tokens=[3, 4],
        begin_suppress_tokens=[5],
    )


MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "vit": ("vit", lambda: ViTModel(vit_config())),
    "vit-classifier": ("vit", lambda: ViTForImageClassification(vit_config())),
    "dinov2": ("vit", lambda: Dinov2Model(dinov2_config())),
    "dinov2-gated": ("vit", lambda: Dinov2Model(dinov2_config(gated=True))),
    "whisper": ("whisper", lambda: WhisperModel(whisper_config())),
    "whisper-generator": (
        "whisper",
        lambda: WhisperForConditionalGeneration(whisper_config()),
    ),
}


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, nn.Module]:
    """Family, checkpoint directory and the model in it."""
    family, build = MODELS[request.param]
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path / "model")
    return family, tmp_path / "model", model


def test_profiling_only_models_load_and_are_described_whole(
    saved: tuple[str, Path, nn.Module],
) -> None:
    family, directory, model = saved
    loaded = load(directory)
    assert loaded.family == family
    architecture = loaded.architecture
    expected = model.state_dict()
    names = [name for _, _, name in architecture.attention_projections()]
    names += [name for _, _, name in architecture.feed_forward_projections()]
    for name in names:
        assert torch.equal(
            weight_matrix(loaded.model.get_submodule(name)).float(), expected[f"{name}.weight"]
        )
    linears = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    heads = {name for name in linears if name.endswith(("pooler.dense", "classifier", "proj_out"))}
    assert sorted(names) == sorted(linears - heads)


def test_blocks_of_an_encoder_decoder_know_where_they_are() -> None:
    architecture = describe("whisper", WhisperModel(whisper_config()))
    places = [(b.stack, b.layer, b.sublayer, b.kind, b.depth) for b in architecture.attention]
    assert places == [
        *(("encoder", depth, 0, "encoder", depth) for depth in range(LAYERS)),
        ("decoder", 0, 0, "decoder", 0),
        ("decoder", 0, 1, "cross", LAYERS),
        ("decoder", 1, 0, "decoder", 1),
        ("decoder", 1, 1, "cross", LAYERS + 1),
    ]
    feeds = [(f.stack, f.layer, f.sublayer) for f in architecture.feed_forward]
    assert feeds == [
        *(("encoder", depth, 1) for depth in range(LAYERS)),
        ("decoder", 0, 2),
        ("decoder", 1, 2),
    ]


def test_profiling_only_models_are_profiled(
    saved: tuple[str, Path, nn.Module], tmp_path: Path
) -> None:
    family, directory, model = saved
    result = profile(load(directory), epsilons=[0.1])
    architecture = describe(family, model)
    projections = [*architecture.attention_projections(), *architecture.feed_forward_projections()]
    assert [weight.name for weight in result.weights] == [name for *_, name in projections]
    assert result.inputs == ()
    for weight in result.weights[:4]:
        sigma = torch.linalg.svdvals(model.get_parameter(f"{weight.name}.weight").detach())
        assert weight.spectrum.largest == pytest.approx(
            float(sigma[0]), rel=1e-2
        )  # shown with three digits
    assert save_profile_figures(result, tmp_path / "figures")


def test_embedding_of_a_vision_transformer_is_its_patch_projection(tmp_path: Path) -> None:
    model = ViTModel(vit_config())
    model.save_pretrained(tmp_path)
    group = profile(load(tmp_path), epsilons=[0.1]).embedding[0]
    weight = model.embeddings.patch_embeddings.projection.weight.detach().flatten(1)
    assert (group.name, group.rows) == ("pixels", weight.shape[1])
    expected = torch.linalg.svdvals(weight)
    assert group.spectrum.largest == pytest.approx(
        float(expected[0]), rel=1e-2
    )  # shown with three digits


def test_profile_command_takes_them_and_compress_refuses_in_one_line(
    saved: tuple[str, Path, nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family, directory, _ = saved

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["tscompress", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert run("profile", directory, "--epsilon", "0.1") == 0
    assert "ε-rank" in capsys.readouterr().out
    assert run("compress", directory, "--rank", "4", "--output", tmp_path / "out") == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert f"is a {family} model, which does not forecast" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_missing_weights_of_a_vision_transformer_are_refused(tmp_path: Path) -> None:
    ViTModel(vit_config()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("layernorm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match="lacks weights"):
        load(tmp_path)
    tensors["spare"] = torch.zeros(WIDTH)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CorruptCheckpointError, match=r"lacks 'layernorm\.weight'"):
        load(tmp_path)


def test_adapters_of_families_that_do_not_forecast_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="a whisper model does not forecast"):
        adapter_of("whisper")
    pipeline: Any = nn.Identity()
    with pytest.raises(UnsupportedModelError, match="Identity"):
        adapter_of_pipeline(pipeline)


def test_adapters_agree_with_the_stock_pipelines(checkpoint: Path) -> None:
    """One predict call through the adapter is the stock pipeline's own."""
    loaded = load(checkpoint, dtype="float32")
    adapter = adapter_of(loaded.family)
    assert adapter is adapter_of_pipeline(loaded.forecaster)
    contexts = torch.randn(2, 40, generator=torch.Generator().manual_seed(0)).cumsum(1)
    torch.manual_seed(1)
    ours = adapter.quantiles(loaded.forecaster, contexts, 8, [0.1, 0.5, 0.9])
    torch.manual_seed(1)
    theirs, _ = loaded.forecaster.predict_quantiles(
        list(contexts), prediction_length=8, quantile_levels=[0.1, 0.5, 0.9]
    )
    theirs = theirs if isinstance(theirs, torch.Tensor) else torch.cat(theirs)
    assert ours.shape == (2, 8, 3)
    assert torch.equal(ours, theirs)
