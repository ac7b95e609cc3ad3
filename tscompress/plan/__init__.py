"""Sizes of a model before and after compression, as data without torch. Read ``architecture``
first, then ``layer_plans``, ``plan`` and ``schedules``.
"""
