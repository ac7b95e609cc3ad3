"""Forecast quality. ``evaluate`` scores a model on a suite: ``forecasting`` and ``batching`` make
forecasts, ``metrics`` scores them, ``results`` holds the scores, ``score_cache`` finds earlier
ones. ``comparison`` compares models with ``intervals``, ``fidelity`` measures how forecasts
changed, ``derived`` makes results of others, ``typical_series`` chooses examples, ``tables`` is for
a terminal. The layouts of others: ``fev_tasks``, ``gift_eval``.
"""
