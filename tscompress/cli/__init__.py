"""The command: a module for each group of subcommands, joined in ``app``; shared options
(``options``), output (``console``), and Ctrl-C (``interrupts``).
"""
