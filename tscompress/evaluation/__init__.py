"""Forecast quality: score models on suites (``evaluate``, ``batching``, ``score_cache``), compare
them with intervals (``comparison``), tell how forecasts changed (``fidelity``), and the layouts of
others (``fev_tasks``, ``gift_eval``).
"""
