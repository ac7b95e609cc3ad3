"""A randomly initialised model of a recipe, or one that starts from a trained model.

With a ``schedule`` the model is compressed by design (Yu et al., 2025, sec. 5, tables 3 and 4):
head sizes differ between attention blocks from the first step on.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from chronos.chronos import ChronosConfig
from torch import nn
from transformers import PreTrainedModel, T5Config

from tscompress.checkpoints.load import load
from tscompress.compression.fold_plans import fold_plan_of
from tscompress.errors import RecipeError
from tscompress.families.base import ModelShape
from tscompress.families.registry import adapter_of
from tscompress.io.seeds import seeded
from tscompress.layers.resize import replace_heads_
from tscompress.plan.plan import Plan
from tscompress.training.growth import grow_
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.token_tables import chebyshev_token_embedding, fourier_token_embedding


def build_model(recipe: PretrainRecipe) -> PreTrainedModel:
    """A randomly initialised model of the recipe's shape, in float32.

    Raises
    ------
    RecipeError
        ``embedding_from`` or ``start_from`` is of another family or shape.
    ModelLoadError
        It cannot be read.
    """
    model = fresh_model(recipe, *design(recipe))
    start_(model, recipe)
    return model


def start_(model: PreTrainedModel, recipe: PretrainRecipe) -> None:
    """Weights, or an embedding, of the trained model that the recipe names, if any.

    Raises
    ------
    RecipeError
        It is of another family, or its sizes do not fit.
    """
    if recipe.embedding_from is not None:
        reuse_embedding_(model, recipe.family, recipe.embedding_from)
    if recipe.start_from is not None:
        small = load(recipe.start_from)
        if small.family != recipe.family:
            raise RecipeError(
                f"start_from: {recipe.start_from!r} is a {small.family} model; the recipe's family "
                f"is {recipe.family}."
            )
        if small.plan is not None and small.plan.uniform_sizes is None:
            raise RecipeError(
                f"start_from: {recipe.start_from!r} has layers of different sizes; start from a "
                "model whose layers are alike."
            )
        grow_(model, small.model)


def mean_with_start(model: PreTrainedModel, recipe: PretrainRecipe) -> PreTrainedModel:
    """The trained ``model``, or the mean of its weights and those that it started from.

    ``keep_of_start`` of the recipe is the share of the latter: what a training on other data forgot
    comes back in part (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022).
    """
    share = recipe.keep_of_start
    if not share:
        return model
    with seeded(recipe.seed):  # what is new in a larger shape is drawn as it was
        start = build_model(recipe).to(next(model.parameters()).device)
    mean = copy.deepcopy(model)
    with torch.no_grad():
        for ours, first in zip(mean.parameters(), start.parameters(), strict=True):
            ours.lerp_(first, share)
    return mean


def design(recipe: PretrainRecipe) -> tuple[T5Config, Plan | None]:
    """The config, and the head size of each block if they differ.

    Head sizes are ceil(d_0 (1 + i)^alpha), at most ``architecture.d_kv``; cross-attention counts
    after all encoder layers (Yu et al., 2025, sec. 5). If they are equal, the config has them.
    """
    family = adapter_of(recipe.family)
    shape = cast(ModelShape, recipe.architecture)  # frozen; a protocol's attributes are not
    config: T5Config = family.stock_config(shape)
    if recipe.initializer_factor is not None:
        config.initializer_factor = recipe.initializer_factor
    if recipe.schedule is None:
        return config, None
    empty = family.empty_model(config.to_dict())
    plan = fold_plan_of(empty, family.describe(empty), recipe.schedule)
    if plan.uniform_sizes is None:
        return config, plan
    config.d_kv = plan.uniform_sizes[0]
    return config, None


def fresh_model(recipe: PretrainRecipe, config: T5Config, plan: Plan | None) -> PreTrainedModel:
    """A randomly initialised model of ``config``, with the heads of ``plan`` in it."""
    family = adapter_of(recipe.family)
    model: PreTrainedModel = family.stock_class(config)
    if not recipe.tie_embedding:  # before the table: a head starts as a random one would
        family.untie_(model)
    if family.draws_samples:
        install_table_(model, recipe)
    if plan is not None:
        # Feed-forwards keep their size and their weights.
        for head in plan.heads:
            initialize_heads_(replace_heads_(model, head), config.initializer_factor)
    return model


def install_table_(model: PreTrainedModel, recipe: PretrainRecipe) -> None:
    """Write the initial token table of the recipe into ``model``; ``normal`` is there already."""
    if recipe.token_embedding == "normal":
        return
    config = ChronosConfig(**model.config.chronos_config)
    centers = config.create_tokenizer().centers
    if recipe.token_embedding == "fourier":
        table = fourier_token_embedding(centers, model.config.d_model)
        first = config.n_special_tokens  # a token early, as the references have it
    else:
        assert recipe.embedding_rank is not None
        table = chebyshev_token_embedding(
            centers, model.config.d_model, recipe.embedding_rank, seed=recipe.seed
        )
        first = config.n_special_tokens + 1  # the tokenizer's token of the first bin
    with torch.no_grad():
        model.shared.weight[first : first + len(table)] = table


def initialize_heads_(attention: nn.Module, factor: float) -> None:
    """Initialise q, k, v and o as T5 does for this head size.

    W_Q has the standard deviation ``factor`` (d_model d_kv)^{-1/2}, which replaces the division of
    the scores by d_kv^{1/2}; W_K and W_V have ``factor`` d_model^{-1/2}, and W_O has ``factor``
    (heads d_kv)^{-1/2}. The relative position bias is unchanged.
    """
    projections: Any = attention
    q, k, v, o = projections.q, projections.k, projections.v, projections.o
    d_model, head_size = q.in_features, q.out_features // projections.n_heads
    nn.init.normal_(q.weight, std=factor * (d_model * head_size) ** -0.5)
    nn.init.normal_(k.weight, std=factor * d_model**-0.5)
    nn.init.normal_(v.weight, std=factor * d_model**-0.5)
    nn.init.normal_(o.weight, std=factor * o.in_features**-0.5)


def reuse_embedding_(model: PreTrainedModel, family: str, source: str) -> None:
    """Copy the embedding of the trained model ``source`` into ``model`` (paper Table 3).

    T5: the token table, which is the output layer too. Bolt: the patch embedding and the table of
    special tokens.

    Raises
    ------
    RecipeError
        ``source`` is of another family, or its embedding of another shape.
    ModelLoadError
        It cannot be read.
    """
    loaded = load(source)
    if loaded.family != family:
        raise RecipeError(
            f"embedding_from: {source!r} is a {loaded.family} model; the recipe's family is "
            f"{family}."
        )
    given = embedding_of(loaded.model)
    wanted = embedding_of(model)
    if given.keys() != wanted.keys():
        raise RecipeError(
            f"embedding_from: the embedding of {source!r} has a lower rank; give the model that it "
            "was compressed from."
        )
    for name, parameter in wanted.items():
        shapes = [tuple(tensor.shape) for tensor in (given[name], parameter)]
        if shapes[0] != shapes[1]:
            raise RecipeError(
                f"embedding_from: {name} of {source!r} is {shapes[0]}; the recipe's architecture "
                f"makes it {shapes[1]}."
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])


def embedding_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The modules that embed series for the first layer, by name."""
    parts = ("shared.", "input_patch_embedding.")
    return {name: p for name, p in model.named_parameters() if name.startswith(parts)}
