"""Token tables, their heads and the scale of fresh weights, as a recipe asks for them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from chronos import BaseChronosPipeline
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from shared_fixtures import tiny_recipe

import tscompress
from tscompress.families.registry import adapter_of
from tscompress.families.t5_stack import has_own_head
from tscompress.linalg import singular_values
from tscompress.training.pretrain_model import build_model
from tscompress.training.pretraining import Progress, pretrain
from tscompress.training.token_tables import chebyshev_token_embedding

CHEBYSHEV: dict[str, Any] = {
    "token_embedding": "chebyshev",
    "embedding_rank": 3,
    "tie_embedding": False,
    "freeze_embedding": True,
}
SMOOTHED = [
    {
        "steps": 1,
        "buckets": [{"context_length": 32, "horizon": 8, "batch_size": 4}],
        "label_smoothing_bins": 1.0,
    }
]


@given(st.integers(1, 12), st.integers(12, 40), st.integers(0, 3))
def test_chebyshev_table_has_its_rank_and_unit_scale(rank: int, d_model: int, seed: int) -> None:
    table = chebyshev_token_embedding(torch.linspace(-15, 15, 101), d_model, rank, seed=seed)
    assert table.shape == (101, d_model)
    sigma = singular_values(table)
    assert sigma[rank - 1] > 1e-3 * sigma[0]
    assert (sigma[rank:] < 1e-6 * sigma[0]).all()
    assert float(table.square().mean()) == pytest.approx(1, abs=1e-5)


def test_chebyshev_rows_are_polynomials_of_the_bin_centre() -> None:
    x = torch.linspace(-15, 15, 61, dtype=torch.float64) / 15
    table = chebyshev_token_embedding(15 * x, 24, 4).double()
    before, polynomials = torch.ones_like(x), [x]
    for _ in range(3):  # T_{j+1} = 2 x T_j - T_{j-1}
        polynomials.append(2 * x * polynomials[-1] - before)
        before = polynomials[-2]
    basis = torch.stack(polynomials, dim=1)  # [61, 4], no T_0
    directions = torch.linalg.lstsq(basis, table).solution
    assert torch.allclose(basis @ directions, table, atol=1e-5)
    gram = directions @ directions.T
    assert torch.allclose(gram / gram[0, 0], torch.eye(4, dtype=torch.float64), atol=1e-5)


def test_chebyshev_table_is_at_the_tokens_of_its_bins() -> None:
    recipe = tiny_recipe("chronos-t5", **CHEBYSHEV)
    model = build_model(recipe)
    tokenizer: Any = adapter_of("chronos-t5").pipeline(model).tokenizer
    centers = tokenizer.centers
    tokens, _, _ = tokenizer._input_transform(centers[None], scale=torch.ones(1))
    table = chebyshev_token_embedding(centers, 24, 3, seed=recipe.seed)
    assert torch.equal(model.shared.weight[tokens[0]], table)


def test_untied_head_trains_beside_a_frozen_table_and_opens_in_stock_chronos(
    tmp_path: Path,
) -> None:
    recipe = tiny_recipe("chronos-t5", **CHEBYSHEV)
    begun: Any = build_model(recipe)
    directory = pretrain(recipe, tmp_path)
    assert directory is not None
    loaded: Any = tscompress.load(directory).model
    assert has_own_head(loaded.config)
    begun_table = begun.shared.weight[3:].bfloat16()  # special tokens are drawn
    assert torch.equal(loaded.shared.weight[3:].bfloat16(), begun_table)
    assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    stock: Any = BaseChronosPipeline.from_pretrained(directory)
    inner = stock.inner_model
    assert torch.equal(inner.lm_head.weight.to(loaded.dtype), loaded.lm_head.weight)
    assert torch.equal(inner.encoder.embed_tokens.weight, inner.shared.weight)
    torch.manual_seed(0)
    forecast = stock.predict(torch.arange(30.0), prediction_length=4)
    assert torch.isfinite(forecast).all()


def test_untied_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    stages = tiny_recipe("chronos-t5").stages
    recipe = tiny_recipe("chronos-t5", **CHEBYSHEV)
    short = recipe.model_copy(update={"stages": (stages[0].model_copy(update={"steps": 2}),)})

    def stop(progress: Progress) -> None:
        if progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    whole = pretrain(short, tmp_path / "whole")
    assert pretrain(short, tmp_path / "parts", report=stop, log_every=1) is None
    resumed = pretrain(short, tmp_path / "parts", resume=True)
    assert whole is not None
    assert resumed is not None
    ours, theirs = (tscompress.load(path).model.state_dict() for path in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", ["chronos-t5", "chronos-bolt", "chronos-2"])
def test_initializer_factor_scales_fresh_weights(family: str) -> None:
    torch.manual_seed(0)
    large: Any = build_model(tiny_recipe(family, initializer_factor=1.0))
    torch.manual_seed(0)
    small: Any = build_model(tiny_recipe(family, initializer_factor=0.05))
    name = next(n for n, _ in large.named_parameters() if n.endswith(".q.weight"))
    ours, theirs = small.get_parameter(name), large.get_parameter(name)
    assert torch.allclose(ours, 0.05 * theirs, rtol=1e-4)


@pytest.mark.parametrize(("family", "changes", "key"), [
    ("chronos-bolt", {"tie_embedding": False}, "tie_embedding"),
    ("chronos-2", CHEBYSHEV | {"tie_embedding": True}, "token_embedding"),
    ("chronos-2", {"token_embedding": "normal"}, "token_embedding is normal, and chronos-2 reads"),
    ("chronos-bolt", {"stages": SMOOTHED}, "label_smoothing_bins"),
    ("chronos-t5", CHEBYSHEV | {"embedding_rank": None}, "embedding_rank"),
    ("chronos-t5", {"embedding_rank": 3}, "embedding_rank"),
    ("chronos-t5", CHEBYSHEV | {"embedding_rank": 25}, "at most 24"),
    ("chronos-t5", CHEBYSHEV | {"tie_embedding": True}, "tie_embedding: false"),
    ("chronos-t5", CHEBYSHEV | {"freeze_embedding": False}, "freeze_embedding: true"),
    ("chronos-t5", CHEBYSHEV | {"embedding_from": "model"}, "embedding_from"),
    ("chronos-t5", {"start_from": "model", "tie_embedding": False}, "start_from"),
    ("chronos-t5", {"initializer_factor": 0.0}, "initializer_factor"),
])  # fmt: skip
def test_keys_that_do_not_fit_together_are_refused(
    family: str, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(ValidationError, match=key):
        tiny_recipe(family, **changes)
