"""Skill of a model at tasks whose best possible forecast is known from the generating process.

Read in this order: ``tasks`` (what is asked), ``processes`` (how series are drawn and what the best
forecast of them is), ``results`` (skill, intervals, comparisons), ``measure`` (a model is asked),
``tables`` (for a terminal).
"""
