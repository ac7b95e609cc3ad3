"""Directories of files: whether they are sound (``config_checks``), how they are found and loaded
(``load``), the factored format (``format``), and where a compressed one came from (``provenance``).
"""
