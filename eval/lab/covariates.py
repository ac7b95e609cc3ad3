"""In-context learning with covariates: four layouts of examples as tokens, and what patches cost.

    python eval/lab/covariates.py --output eval/results/lab-covariates [--quick]
        [--recipe recipes/lab/covariates-cpu.yaml] [--models results/lab-covariates] [--seed 0]
        [--trained-only] [--only patching ...]

Figures 2 and 3 and Theorem 3.1 of "Transformer Designs for In-Context Learning in Foundation Models
for Time Series Forecasting with Covariates" (Dange et al.). Trainings resume from ``--models``, and
draw their curves as they go. ``--trained-only`` draws what has been trained and trains nothing.
``--quick`` trains for a few steps, to see that it runs; its curves show nothing. Exit status 1: a
verdict is not as expected.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from covariate_sections import Trainings, layouts, patches, patching
from learners import CovariatesRecipe, read_recipe, shortened_recipe
from verdicts import Section, measure, parser_of

from tscompress.errors import TscompressError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "lab" / "covariates-cpu.yaml"


def trainings(given: argparse.Namespace) -> Trainings:
    """What the options ask for."""
    recipe = read_recipe(CovariatesRecipe, given.recipe)
    if given.seed:
        recipe = recipe.model_copy(update={"seeds": tuple(given.seed)})
    models = given.models or ROOT / "results" / given.output.name
    if given.quick:
        recipe, models = shortened_recipe(recipe), models.with_name(f"{models.name}-quick")
    return Trainings(recipe, models, given.output, trained_only=given.trained_only)


def main() -> None:
    parser = parser_of(__doc__, ".csv, .md and .png")
    parser.add_argument("--quick", action="store_true", help="smaller, for a look")
    parser.add_argument("--only", action="append", help="sections; default: all")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--models", type=Path, help="directory of trainings")
    parser.add_argument("--seed", type=int, action="append", help="default: the recipe's")
    parser.add_argument("--trained-only", action="store_true", help="train nothing")
    given = parser.parse_args()
    try:
        asked = trainings(given)
        sections: dict[str, Section] = {
            "patching": patching,
            "layouts": partial(layouts, asked),
            "patches": partial(patches, asked),
        }
        as_expected = measure(sections, given.output, quick=given.quick, only=given.only)
    except TscompressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if as_expected else 1)


if __name__ == "__main__":
    main()
