"""``report.html`` and ``report.md``: what a report says (``content``, ``points``), its charts
(``svg``, ``strips``, and ``*_charts`` by subject), and the page (``page``, ``write``).
"""
