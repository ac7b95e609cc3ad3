"""The method. Calibrate (``calibration``), choose sizes (``fold_plans``), rotate and slice the
residual stream (``residual_stream``), fold layer by layer (``layer_walk``, ``fold``), and put a
plan into effect (``apply``).
"""
