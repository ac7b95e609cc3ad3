"""Growth: a larger model with the function of a smaller one, which trains on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from shared_fixtures import tiny_recipe
from torch import nn

import tscompress
from tscompress.checkpoints.load import load
from tscompress.compression.calibration import CalibrationConfig
from tscompress.data.batch import ForecastBatch
from tscompress.errors import RecipeError
from tscompress.families.registry import adapter_of
from tscompress.training.growth import grow_
from tscompress.training.pretrain_losses import loss_function
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretrain_output import save_pretrained
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.pretraining import pretrain

TRAINED = ["chronos-bolt", "chronos-t5", "chronos-2"]
LARGER = {"d_model": 48, "num_heads": 5, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 3}


def larger(family: str, parts: Iterable[str] = LARGER) -> dict[str, int]:
    """Sizes of ``parts`` that models of a family have."""
    lacking = {"num_decoder_layers"} if family == "chronos-2" else set()
    return {part: LARGER[part] for part in parts if part not in lacking}


def recipe(family: str, start_from: str | None = None, **shape: int) -> PretrainRecipe:
    plain = tiny_recipe(family)
    architecture = plain.architecture.model_dump() | shape
    changes = {"architecture": architecture, "start_from": start_from}
    return PretrainRecipe.model_validate(plain.model_dump() | changes)


def trained(family: str) -> nn.Module:
    """A small model whose weights, norms and biases among them, are not those of a fresh one."""
    torch.manual_seed(1)
    model = build_model(recipe(family)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch() -> ForecastBatch:
    generator = torch.Generator().manual_seed(0)
    series = torch.randn(4, 48, generator=generator).cumsum(1)
    return ForecastBatch(series[:, :32], series[:, 32:])


def outputs(model: nn.Module, family: str) -> torch.Tensor:
    if family != "chronos-t5":
        return model(context=batch().context).quantile_preds
    tokens = torch.arange(2, 50)[None] % model.config.vocab_size
    return model(input_ids=tokens[:, :32], decoder_input_ids=tokens[:, 32:]).logits


@pytest.mark.parametrize(
    ("family", "part"), [(f, part) for f in TRAINED for part in [*larger(f), "all"]]
)
def test_grown_model_has_the_function_of_the_small_one(family: str, part: str) -> None:
    small = trained(family)
    shape = larger(family) if part == "all" else {part: LARGER[part]}
    if family == "chronos-t5" and part.startswith("num_") and part.endswith("layers"):
        shape = larger(family, ("num_layers", "num_decoder_layers"))
    large = build_model(recipe(family, **shape)).eval()
    before = outputs(large, family)
    grow_(large, small)
    assert sum(p.numel() for p in large.parameters()) > sum(p.numel() for p in small.parameters())
    expected = outputs(small, family)
    assert not torch.allclose(before, expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(outputs(large, family), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("family", TRAINED)
def test_gradients_reach_new_parameters(family: str) -> None:
    small = trained(family)
    large = build_model(recipe(family, **larger(family)))
    grow_(large, small)
    loss_function(large)(large, batch()).backward()
    for name, parameter in large.named_parameters():
        if not name.endswith((".o.weight", "wo.weight")):
            continue
        assert parameter.grad is not None
        # The last dimension of the stream is new. In a decoder a tied head reads it, with zeros.
        if not (family == "chronos-t5" and name.startswith("decoder.")):
            assert parameter.grad[-1].abs().max() > 0, name
        assert parameter.grad[:, -1].abs().max() > 0 or "wo" in name, name  # of a new head


def test_pretraining_starts_from_a_smaller_checkpoint(tmp_path: Path) -> None:
    small = trained("chronos-bolt")
    save_pretrained(small, tmp_path / "small")  # type: ignore[arg-type]
    large = build_model(recipe("chronos-bolt", str(tmp_path / "small"), **LARGER)).eval()
    expected = outputs(small, "chronos-bolt")
    torch.testing.assert_close(
        outputs(large, "chronos-bolt"),
        expected,
        rtol=0.05,
        atol=0.05 * float(expected.detach().std()),
    )


@pytest.mark.parametrize(
    ("shape", "word"),
    [({"d_kv": 4}, "d_kv"), ({"d_model": 16}, "d_model"), ({"patch_size": 8}, "input_patch_size")],
)
def test_unfit_shape_is_refused(shape: dict[str, int], word: str) -> None:
    small = trained("chronos-bolt")
    with pytest.raises(RecipeError, match=f"start_from.*{word}"):
        grow_(build_model(recipe("chronos-bolt", **shape)), small)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "shape", "says"),
    [
        ("chronos-bolt", {"prediction_length": 8}, "prediction_length"),
        ("chronos-bolt", {"prediction_length": 64}, "prediction_length"),
        ("chronos-2", {"context_length": 4096}, r"time_encoding_scale .*\(context_length gives"),
    ],
)
def test_forecasts_and_times_are_written_alike(
    family: str, shape: dict[str, int], says: str
) -> None:
    with pytest.raises(RecipeError, match=f"start_from: its {says}.*must be alike"):
        grow_(build_model(recipe(family, **shape)), trained(family))  # type: ignore[arg-type]
    steps = {"prediction_length": 48, "context_length": 96}
    grow_(build_model(recipe("chronos-t5", **steps)), trained("chronos-t5"))  # type: ignore[arg-type]


def test_a_model_with_a_head_of_its_own_is_refused() -> None:
    small = trained("chronos-t5")
    adapter_of("chronos-t5").untie_(small)
    with pytest.raises(RecipeError, match=r"start_from: it has lm_head\.weight"):
        grow_(build_model(recipe("chronos-t5", **larger("chronos-t5"))), small)  # type: ignore[arg-type]


def test_a_model_of_layers_of_different_sizes_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    few = CalibrationConfig(source="synthetic", num_series=4, context_length=32)
    small = tscompress.compress(checkpoints["chronos-bolt"], method="svd", rank=3, calibration=few)
    tscompress.save(small, tmp_path / "small")
    with pytest.raises(RecipeError, match="layers of different sizes"):
        build_model(recipe("chronos-bolt", str(tmp_path / "small"), **LARGER))


def test_another_family_is_refused(tmp_path: Path) -> None:
    save_pretrained(trained("chronos-t5"), tmp_path / "t5")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"start_from: .* is a chronos-t5 model"):
        build_model(recipe("chronos-bolt", str(tmp_path / "t5")))


@pytest.mark.parametrize("shape", [{}, LARGER])
def test_a_share_of_the_start_is_kept(shape: dict[str, int], tmp_path: Path) -> None:
    save_pretrained(trained("chronos-bolt"), tmp_path / "start")  # type: ignore[arg-type]
    plain = recipe("chronos-bolt", str(tmp_path / "start"), **shape)
    torch.manual_seed(plain.seed)
    weights = {"start": dict(build_model(plain).named_parameters())}
    for share in (0.0, 0.25):
        changed = plain.model_copy(update={"keep_of_start": share})
        path = pretrain(changed, tmp_path / str(share))
        assert path is not None
        model: nn.Module = load(str(path), dtype="float32").model
        weights[str(share)] = dict(model.named_parameters())
    for name, mean in weights["0.25"].items():
        expected = torch.lerp(weights["0.0"][name], weights["start"][name], 0.25)
        torch.testing.assert_close(mean, expected, rtol=1e-2, atol=1e-3)  # stored in bfloat16
    assert any(not torch.allclose(a, weights["0.0"][n]) for n, a in weights["0.25"].items())


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="keep_of_start"):
        PretrainRecipe.model_validate(recipe("chronos-bolt").model_dump() | {"keep_of_start": 0.5})


def test_a_run_starts_from_one_thing() -> None:
    with pytest.raises(ValidationError, match="start_from and embedding_from"):
        PretrainRecipe.model_validate(
            recipe("chronos-bolt", "a").model_dump() | {"embedding_from": "b"}
        )
