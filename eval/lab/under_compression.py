"""What compression takes first of an in-context learner: the average forecast, or the ability.

    python eval/lab/under_compression.py --output eval/results/lab-under-compression [--quick]
        [--recipe recipes/lab/under-compression-cpu.yaml] [--models results/lab-under-compression]
        [--trained-only] [--only covariates ...]

Learners of covariates.py and instruments.py, cut by truncated SVD, activation-aware SVD and folding
to every head size, without and with a short recovery: last index loss, prediction error,
coefficients and bias slope against size, and Theorem 3 of "Understanding Transformers for Time
Series" (Yu et al., 2025) beside its measured error. Trainings resume from ``--models``, which also
keeps every cut once it is measured; figures are drawn as cuts come. ``--trained-only`` trains no
learner, and cuts those that there are. ``--quick`` takes a few steps of each and small prompts, to
see that it runs. Exit status 1: a measurement failed.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from cut_bounds import bounds
from cut_learners import Asked, UnderCompressionRecipe, shortened
from cut_sections import covariates, explicit, instruments
from learners import ROOT, read_recipe
from verdicts import Section, measure, one_line_errors, parser_of_sections

SECTIONS = ("covariates", "instruments", "explicit", "bounds")


def _options() -> argparse.Namespace:
    parser = parser_of_sections(__doc__, SECTIONS, "a few steps, to see that it runs")
    default = ROOT / "recipes" / "lab" / "under-compression-cpu.yaml"
    parser.add_argument("--recipe", type=Path, default=default)
    parser.add_argument("--models", type=Path, help="directory of trainings and of measured cuts")
    parser.add_argument("--trained-only", action="store_true", help="train no learner")
    return parser.parse_args()


def main() -> None:
    given = _options()
    with one_line_errors():
        recipe = read_recipe(UnderCompressionRecipe, given.recipe)
        models = given.models or ROOT / "results" / given.output.name
        if given.quick:
            recipe, models = shortened(recipe), models.with_name(f"{models.name}-quick")
        asked = Asked(recipe, models, given.output, trained_only=given.trained_only)
        sections: dict[str, Section] = {
            "covariates": partial(covariates, asked),
            "instruments": partial(instruments, asked),
            "explicit": partial(explicit, asked),
            "bounds": partial(bounds, asked),
        }
        measure(sections, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
