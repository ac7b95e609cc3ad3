"""Modules that take the place of stock ones: two factors for one Linear layer, attention with head
sizes of its own, and sample paths that share the keys and values of their series.
"""
