"""Sizes within a budget: what each part costs in loss (``measure_sensitivity``, with its result in
``sensitivity``, ``forecast_loss`` and ``sensitivity_cache``) and in resources (``costs``), the
search over candidates (``search``), and all of it together (``plan_within_budget``).
"""
