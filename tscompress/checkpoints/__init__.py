"""Checkpoint directories: find them (``locate``), check them (``integrity``, ``config_checks``),
load them (``load``), the factored format (``format``), and the origin of a compressed one
(``provenance``).
"""
