"""Directories of files: where they are (``locate``), whether they are sound (``integrity``,
``config_checks``), how they are loaded (``load``), the factored format (``format``), and where a
compressed one came from (``provenance``).
"""
