"""What one ``predict`` call takes (``workload``): latency (``bench``), parameters, bytes, cache and
multiply-accumulates (``sizes``), memory (``process_memory``); its ``results`` and ``tables``.
"""
