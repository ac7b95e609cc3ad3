"""``report.html`` and ``report.md``: the content of a report (``content``, ``points``), its charts
(``svg``, ``strips``, and ``*_charts`` by subject), and the page (``page``, ``write``).
"""
