"""Sizes within a budget: sensitivities of the forecast loss (``measure_sensitivity``, with
``sensitivity``, ``forecast_loss`` and ``sensitivity_cache``), exact costs (``costs``), the search
over candidates (``search``), and the three together (``plan_within_budget``, with ``window_loss``);
fewer layers (``layer_removal``).
"""
