"""Cost of one ``predict`` call (``workload``): latency (``bench``), parameters, bytes, cache and
multiply-accumulates (``sizes``), memory (``process_memory``); ``results`` and ``tables``.
"""
