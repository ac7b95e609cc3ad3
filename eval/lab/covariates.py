"""In-context learning with covariates: four layouts of examples as tokens, and what patches cost.

    python eval/lab/covariates.py --output eval/results/lab-covariates [--quick]
        [--recipe recipes/lab/covariates-cpu.yaml] [--models results/lab-covariates] [--seeds 0 1]
        [--device cuda] [--trained-only] [--only patching ...]

Figures 2 and 3 and Theorem 3.1 of "Transformer Designs for In-Context Learning in Foundation Models
for Time Series Forecasting with Covariates" (Dange et al.). Trainings resume from ``--models``, and
draw their curves as they go. ``--trained-only`` draws what has been trained and trains nothing.
``--quick`` trains for a few steps, to see that it runs; its curves show nothing. Exit status 1: a
measurement failed.
"""

from __future__ import annotations

from functools import partial

from covariate_sections import Trainings, layouts, patches, patching
from learners import CovariatesRecipe, options_of
from verdicts import Section, measure, one_line_errors

SECTIONS = ("patching", "layouts", "patches")


def main() -> None:
    given = options_of(__doc__, "covariates-cpu", SECTIONS)
    with one_line_errors():
        asked = Trainings.asked(given, CovariatesRecipe)
        sections: dict[str, Section] = {
            "patching": patching,
            "layouts": partial(layouts, asked),
            "patches": partial(patches, asked),
        }
        measure(sections, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
