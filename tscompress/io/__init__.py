"""The machine and the network: files that appear whole or not at all, files of others that are read
with bounds, bounded requests to the Hub, and memory that goes back to the system.
"""
