"""``python -m tscompress`` and the command ``tscompress``; Ctrl-C is one line from its start on."""

import sys

from tscompress.cli.interrupts import STOPPED, STOPPED_MESSAGE, arrived, listen


def main() -> None:
    """Entry point."""
    try:
        listen()
        from tscompress.cli.app import main as command  # what it imports takes a moment

        command()
    except KeyboardInterrupt:
        arrived()  # or the timer that insists on it ends the interpreter while it shuts down
        sys.stderr.write(STOPPED_MESSAGE + "\n")
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
