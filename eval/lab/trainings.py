"""Embeddings and queries of small models of our own: Figures 3a and 4a, and a learnt token table.

    python eval/lab/trainings.py --output results/lab-trainings [--quick] [--runs results/lab]

Trains Chronos-Bolts that read patches of 1 to 32 values (recipes/lab/patches.yaml), micro T5s whose
token tables start at random (token-table.yaml), and micro T5s that are 64 to 384 wide
(widths.yaml): 16 models, of which those that are there are not trained again.
"""

from __future__ import annotations

from functools import partial

from micro import options_of
from training_patches import figure_3a
from training_table import token_table
from training_widths import SEEDS, figure_4a
from verdicts import measure, one_line_errors


def main() -> None:
    given = options_of(__doc__, SEEDS)
    sections = {
        "figure-3a": partial(figure_3a, given.runs),
        "token-table": partial(token_table, given.runs),
        "figure-4a": partial(figure_4a, given.runs, given.seeds),
    }
    with one_line_errors():
        measure(sections, given.output, quick=given.quick)


if __name__ == "__main__":
    main()
