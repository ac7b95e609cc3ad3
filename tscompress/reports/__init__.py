"""``report.html`` and ``report.md``: content (``content``, ``verdict``, ``terms``, ``points``),
charts (``svg``, ``strips``, and ``*_charts`` by subject), and the page (``page``, ``write``).
"""
