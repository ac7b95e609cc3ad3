"""Forecast quality. ``evaluate`` scores a model on a suite: ``forecasting`` and ``batching`` make
forecasts, ``metrics`` scores them, ``results`` holds the scores, ``score_cache`` caches them.
``comparison`` compares models with ``intervals``, ``fidelity`` measures how forecasts changed,
``derived`` combines results, ``typical_series`` chooses examples, ``tables`` is for a terminal.
Other benchmarks: ``fev_tasks``, ``gift_eval``.
"""
