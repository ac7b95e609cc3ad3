"""The method: calibrate (``calibration``, ``activations``), choose sizes (``fold_plans``), rotate
and slice the residual stream (``residual_stream``), fold layer by layer (``recording``,
``layer_walk``, ``fold_moments``, ``fold_layers``, ``fold``), without queries and keys that do
nothing (``univariate``), or factor projections (``factor``), apply a plan (``apply``), and compare
what was written with what is in memory (``verify``).
"""
