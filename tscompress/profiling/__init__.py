"""Epsilon-ranks of weights, of layer inputs and of embeddings: measured (``measure``),
kept (``rank_profile``), shown (``tables``, ``figures``).
"""
