"""Latency, memory, multiply-accumulates and the key-value cache of one ``predict`` call."""
