"""Sizes within a budget: what each part costs in loss (``measure_sensitivity``) and in resources
(``costs``), the search over candidates (``search``), and all of it together
(``plan_within_budget``).
"""
