"""The theorems of the paper in numbers: what holds, what does not as printed, what does instead.

    python eval/lab/theory.py --output eval/results/lab-theory [--quick] [--only theorem-3 ...]

Every section draws matrices with given spectra in float64 and measures a statement of
"Understanding Transformers for Time Series: Rank Structure, Flow-of-ranks, and Compressibility":
its bounds, the examples that its proofs construct, and the experiments of its Appendix F. Written
are the numbers and a figure of each section, and one table of verdicts. With ``--only`` those of
other sections stay. ``--quick`` has smaller matrices. Exit status 1: a measurement failed.
"""

from __future__ import annotations

import torch
from theory_attention import theorem_3
from theory_embeddings import figure_15, theorem_1, theorem_2
from theory_flow import theorem_4
from theory_heads import sketches, theorem_6
from theory_models import real_layers
from verdicts import Section, measure, one_line_errors, parser_of_sections

SECTIONS: dict[str, Section] = {
    "theorem-1": theorem_1,
    "theorem-2": theorem_2,
    "theorem-3": theorem_3,
    "real-layers": real_layers,
    "theorem-4": theorem_4,
    "theorem-6": theorem_6,
    "sketches": sketches,
    "figure-15": figure_15,
}


def main() -> None:
    given = parser_of_sections(__doc__, SECTIONS, "smaller matrices, half a minute").parse_args()
    torch.set_num_threads(1)
    with one_line_errors():
        measure(SECTIONS, given.output, quick=given.quick, only=given.only)


if __name__ == "__main__":
    main()
