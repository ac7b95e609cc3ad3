"""The batch of every step of a pretraining; depends on nothing but the recipe and the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tscompress.data.batch import ForecastBatch
from tscompress.data.synthetic import SyntheticCorpus
from tscompress.data.training_collections import training_series
from tscompress.errors import RecipeError
from tscompress.training.pretrain_recipe import PretrainRecipe
from tscompress.training.windows import draw_bucket, split_windows


def stage_corpora(recipe: PretrainRecipe) -> list[SyntheticCorpus]:
    """The corpus of every stage.

    Raises
    ------
    RecipeError
        No series are left to draw.
    """
    real = training_series(recipe.real_series)
    try:
        return [SyntheticCorpus(stage.corpus or recipe.corpus, real) for stage in recipe.stages]
    except ValueError as error:
        raise RecipeError(f"corpus: {error}.") from None


def make_batch(
    recipe: PretrainRecipe, corpora: Sequence[SyntheticCorpus], step: int
) -> ForecastBatch:
    """The batch of a step; depends on nothing but the recipe and the step."""
    rng = np.random.default_rng([recipe.seed, step])
    index = recipe.stage_at(step)
    stage, corpus = recipe.stages[index], corpora[index]
    bucket = draw_bucket(rng, stage.buckets)
    length = bucket.context_length
    series = corpus.sample(rng, bucket.batch_size, length + bucket.horizon)
    context, target = split_windows(
        rng, series, length, recipe.missing_probability, stage.shorten_probability
    )
    return ForecastBatch(torch.from_numpy(context), torch.from_numpy(target))
