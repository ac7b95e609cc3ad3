"""Options of files of series, written once for every command that reads such files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from tscompress.cli.console import path
from tscompress.errors import UsageError

if TYPE_CHECKING:
    from tscompress.data.reading.format import GivenSeries

SeriesFile = Annotated[
    Path | None, typer.Option(help="Series in CSV, Parquet, Arrow or JSON lines.", parser=path)
]


def _option(kind: Any, *names: str, help: str, **limits: Any) -> Any:
    """An option of the panel that all of them are shown in."""
    option = typer.Option(*names, help=help, rich_help_panel="Files of series", **limits)
    return Annotated[kind, option]


#: How files of series are written. The names are those of ``SeriesFormat``.
_COLUMNS: dict[str, Any] = {
    "id_column": _option(str | None, help="Identifies series; several as in store,item."),
    "time_column": _option(str | None, help="Of dates."),
    "target_column": _option(
        str | None,
        help="Of values; several that are forecast together as in load,price; or a shell pattern, "
        "such as '*' where each column is a series.",
    ),
    "known_covariates": _option(
        str | None,
        help="Columns with values over the horizon, as in promo,holiday; only scoring reads "
        "covariates.",
    ),
    "past_covariates": _option(
        str | None, help="Columns whose values end where a forecast begins."
    ),
    "frequency": _option(str | None, help="Such as 30min; or from the times."),
    "date_format": _option(str | None, help="Such as %d.%m.%Y; s, ms, us or ns since 1970."),
    "separator": _option(str | None, help="One character, or tab."),
    "decimal": _option(str | None, "--decimal", help=". or ,"),
    "encoding": _option(str | None, help="UTF-8, or such as cp1252."),
}
_HOLD_OUT: dict[str, Any] = {
    "hold_out": _option(
        int | None, help="Number of steps at the end of each series to leave for evaluate.", min=0
    )
}
COLUMN_OPTIONS = tuple(_COLUMNS)
SERIES_OPTIONS = (*_COLUMNS, *_HOLD_OUT)


@dataclass(frozen=True)
class SeriesOptions:
    """Options of the command line for files of series.

    Attributes
    ----------
    said
        The options that were given, by name.
    """

    said: Mapping[str, Any] = field(default_factory=dict)

    def form(self, *, reads: bool = True) -> GivenSeries:
        """Columns, notation and held-out steps; ``reads``: there is a file that they are about.

        Raises
        ------
        UsageError
            There is none, and an option was given.
        RecipeError
            An option is out of range.
        """
        from tscompress.data.reading.format import GivenSeries
        from tscompress.workflows.recipe import validate

        if self.said and not reads:
            flag = next(iter(self.said)).replace("_", "-")
            raise UsageError(
                f"without --series there is no file of series; --{flag} cannot go with it."
            )
        return validate(GivenSeries, dict(self.said), source="the options")


#: Default of a command's parameter, which :func:`with_series_options` replaces.
NOTHING_SAID = SeriesOptions()


def with_series_options(
    *, hold_out: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options, in the place of its parameter of :class:`SeriesOptions`.

    Parameters
    ----------
    hold_out
        Also the option to leave steps at the end of each series.
    """
    options = {**_COLUMNS, **_HOLD_OUT} if hold_out else _COLUMNS

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        (place,) = (name for name, kind in hints.items() if kind is SeriesOptions)
        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name == place:
                parameters += (
                    parameter.replace(name=option, annotation=kind, default=None)
                    for option, kind in options.items()
                )
            else:
                parameters.append(parameter.replace(annotation=hints[name]))

        @wraps(command)
        def with_options(**given: Any) -> None:
            said = {name: given.pop(name) for name in options}
            known = {name: value for name, value in said.items() if value is not None}
            command(**given, **{place: SeriesOptions(known)})

        signature = inspect.Signature(parameters, return_annotation=None)
        with_options.__signature__ = signature  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in parameters}
        return with_options

    return decorated
