"""The machine and the network.

Outputs that appear whole or not at all (``files``) or together (``making_way``), where they lead
(``places``), which of them are our own (``own_outputs``),
hashes (``hashing``), results as JSON (``results``), files of others read with bounds
(``untrusted``), bounded requests to the Hub (``network``) and their errors in words
(``hub_errors``), memory that is free and that goes back to the system (``memory``), numbers
for people (``text``).
"""
