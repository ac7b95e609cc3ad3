"""``report.html`` and ``report.md``: what a report says (``content``), its charts (``charts``,
``points``), and the page (``page``, ``write``).
"""
