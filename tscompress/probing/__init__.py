"""Skill of a model at tasks whose best possible forecast is known from the generating process.

Read in this order: ``tasks``, ``processes`` (series and their best possible forecasts), ``results``
(skill, intervals, comparisons), ``measure`` (skill of a model), ``tables`` (for a terminal). The
response to covariates is in ``regressions`` (series) and ``responses`` (measures, comparisons).
"""
