"""How many series each kind of family is calibrated on: light, so that ``--help`` may show it."""

from __future__ import annotations

#: Of families with one token a step, by default.
OF_TOKENS = 1024
#: Of those held out, the loss of hundreds of cuts is measured on a quarter.
LOSS_OF_TOKENS = 64
#: Of families that read patches: the decoder of Chronos-Bolt has one position per series, and with
#: fewer series fits of its layers follow the noise; Chronos-2 keeps less with fewer, too.
OF_PATCHES = 4096
#: For help and descriptions.
BY_DEFAULT = f"by default {OF_TOKENS} for Chronos-T5, {OF_PATCHES} for Chronos-Bolt and Chronos-2"
