"""The command: a module for each group of subcommands, joined in ``app``; the options that they
share (``options``), what they print (``console``), and Ctrl-C (``interrupts``).
"""
