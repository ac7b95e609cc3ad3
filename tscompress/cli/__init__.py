"""The command: its subcommands (``app``), what it prints (``console``), and Ctrl-C
(``interrupts``).
"""
