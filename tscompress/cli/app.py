"""The ``tscompress`` command: subcommands, exit codes, and one line for each failure.

Nothing heavy is imported until a command runs, so ``--help`` is instant.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tscompress._version import __version__
from tscompress.cli.compress import compress, diff
from tscompress.cli.console import quiet_libraries, replace_unencodable, say
from tscompress.cli.evaluate import compare, evaluate
from tscompress.cli.export import export
from tscompress.cli.interrupts import STOPPED, STOPPED_MESSAGE, arrived
from tscompress.cli.measure import bench, compare_profiles, probe, profile, sensitivity
from tscompress.cli.options import StoppedAndSaved
from tscompress.cli.publish import push
from tscompress.cli.runs import report, run, sweep
from tscompress.cli.series import series
from tscompress.cli.train import pretrain, recover
from tscompress.errors import TscompressError, shortened
from tscompress.io.network import check_endpoint

app = typer.Typer(
    name="tscompress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Make pretrained Chronos models smaller and faster, and measure the cost.\n\n"
        "A MODEL is a Hub id (amazon/chronos-bolt-small), a directory, reference/bolt, "
        "reference/bolt-nano, reference/t5, reference/t5-nano or reference/chronos2 (small models "
        "that ship with tscompress), or the output of compress.\n\n"
        "First steps, offline:\n\n"
        "  tscompress profile reference/bolt\n\n"
        "  tscompress compress reference/bolt --width 0.5 --ff-ratio 0.5 --output small\n\n"
        "  tscompress evaluate small --against reference/bolt\n\n"
        "  tscompress bench small --against reference/bolt"
    ),
)
_debug = False
#: ClickException; some versions of typer bundle click.
_UsageMistake: Any = typer.BadParameter.__mro__[2]

#: In the order of the help.
_COMMANDS = (
    profile, compare_profiles, sensitivity, compress, evaluate, compare, probe, bench, run, sweep,
    report, recover, pretrain, diff, series, export, push,
)  # fmt: skip
for command in _COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and all logs.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    global _debug
    _debug = debug
    if version:
        say(f"tscompress {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help().rstrip())
        raise typer.Exit(code=2)
    check_endpoint()
    if not debug:
        quiet_libraries()


def main() -> None:
    """Run the command: every expected error is one line and an exit code."""
    replace_unencodable()
    try:
        code = app(prog_name="tscompress", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = STOPPED
    except StoppedAndSaved:
        arrived()
        sys.exit(STOPPED)
    except _UsageMistake as error:
        error.show()
        code = error.exit_code
    except TscompressError as error:
        code = _fail(str(error), error.exit_code, error)
    except OSError as error:
        code = _fail(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "), 1, error)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        if arrived():  # a library turned Ctrl-C into another error
            code = STOPPED
        else:
            code = _fail(f"unexpected {type(error).__name__}: {text}; see --debug", 1, error)
    arrived()
    if code == STOPPED:  # new versions of typer return it, older ones raise Abort
        typer.echo(STOPPED_MESSAGE, err=True)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, error: BaseException) -> int:
    if _debug:
        raise error
    typer.echo(f"error: {shortened(' '.join(message.split()))}", err=True)
    return code
