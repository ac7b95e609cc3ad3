"""``python -m tscompress`` is the command ``tscompress``."""

from tscompress.cli import main

if __name__ == "__main__":
    main()
