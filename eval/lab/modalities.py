"""Ranks across modalities: series, text, speech, images and tables in the paper's figures.

    python eval/lab/modalities.py --output eval/results/lab-modalities [--quick] [--only flow ...]

Figures 2, 4, 5, 8 and 12 and the text half of Table 2 of "Understanding Transformers for Time
Series: Rank Structure, Flow-of-ranks, and Compressibility", on our reference models and on models
that wheels hold: `pip install "tscompress[lab]"`. Toys with the embeddings of other time-series
models and a tabular classifier are trained first, two minutes on one core, and kept in the cache.
Written are the numbers and a figure of each section, and one table of verdicts. Exit status 1: a
measurement failed.
"""

from __future__ import annotations

import torch
from modality_embeddings import angles, projections, spectra
from modality_text import text_cut
from modality_weights import flow, histograms, layers, widths
from verdicts import Section, measure, one_line_errors, parser_of_sections

SECTIONS: dict[str, Section] = {
    "spectra": spectra,
    "projections": projections,
    "widths": widths,
    "layers": layers,
    "flow": flow,
    "angles": angles,
    "histograms": histograms,
    "text-cut": text_cut,
}


def main() -> None:
    given = parser_of_sections(
        __doc__, SECTIONS, "an eighth of the inputs, for a look"
    ).parse_args()
    torch.set_num_threads(1)
    with one_line_errors():
        measure(SECTIONS, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
