"""Epsilon-ranks of weights, of what layers read and of what is embedded: measured (``measure``),
kept (``rank_profile``), shown (``tables``, ``figures``).
"""
