"""Modules that take the place of stock ones: two factors for one Linear layer (``low_rank``),
attention with head sizes of its own (``sized_attention``) or of one latent
(``latent_cross_attention``), and sample paths that share the keys and values of their series
(``shared_cross_attention``); ``resize`` puts them into a model.
"""
