"""The method: calibrate (``calibration``, ``activations``), choose sizes (``fold_plans``), rotate
and slice the residual stream (``residual_stream``), fold layer by layer (``recording``,
``layer_walk``, ``fold_moments``, ``fold_layers``, ``fold``), without queries and keys that do
nothing (``univariate``), or factor projections (``factor``), and apply a plan (``apply``).
"""
