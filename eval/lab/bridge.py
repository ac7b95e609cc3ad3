"""From the papers to Chronos-2: patches against use of covariates, and what compression keeps.

    python eval/lab/bridge.py --output results/lab-bridge [--quick] [--models results/lab]
        [--trained-only] [--only response ...]

`response`: reference/chronos2 and smaller ones: how their forecasts respond to one more of a
covariate at one step ahead, and how much of that is kept. `patches`: the Chronos-2 of
recipes/lab/bridge.yaml, trained with patches of 1, 4 and 16 steps, all else alike: regret over
ridge regression on the context. Trainings are kept in, and resume from, ``--models``;
``--trained-only`` measures what has been trained. ``--quick`` has fewer groups, and a few steps of
training. Exit status 1: a measurement failed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from bridge_patches import Trainings, patches
from bridge_response import response
from micro import ROOT
from verdicts import Section, measure, one_line_errors, parser_of_sections

SECTIONS = ("response", "patches")


def main() -> None:
    parser = parser_of_sections(__doc__, SECTIONS, "fewer groups, and a few steps of training")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "results" / "lab", help="directory of trainings"
    )
    parser.add_argument("--trained-only", action="store_true", help="train nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    models = given.models / "quick" if given.quick else given.models
    asked = Trainings(models, quick=given.quick, trained_only=given.trained_only)
    sections: dict[str, Section] = {"response": response, "patches": partial(patches, asked)}
    with one_line_errors():
        measure(sections, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
