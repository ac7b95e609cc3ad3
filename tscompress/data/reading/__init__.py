"""Series in files of users: how a file is laid out (``format``, ``layouts``), its cells
(``tables``, ``values``, ``times``), its steps (``time_grid``), and what was read (``read``,
``summary``).
"""
