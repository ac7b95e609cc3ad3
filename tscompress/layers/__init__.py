"""Modules that replace stock ones: two factors for a Linear layer (``low_rank``), attention with
separate sizes of queries-keys and values (``sized_attention``), cross-attention on one latent
(``latent_cross_attention``), group attention without groups (``univariate``), decoders of a single
token (``single_token``), and keys and values shared by the sample paths of a series
(``shared_cross_attention``); ``resize`` puts them into a model.
"""
