"""Model families, one module each, behind the adapters of ``base``; ``registry`` finds the one that
a config, a model or a pipeline belongs to.
"""
