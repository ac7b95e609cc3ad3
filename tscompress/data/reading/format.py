"""Columns and notation of a file of series; other settings are found in the file, or refused."""

from __future__ import annotations

import codecs
from typing import Any, Literal

from pydantic import Field, field_validator

from tscompress.io.strict import Strict

ID_COLUMNS = ("item_id", "id", "unique_id", "series_id", "series")
TIME_COLUMNS = ("timestamp", "time", "ds", "date", "datetime")
TARGET_COLUMNS = ("target", "y", "value")


class SeriesFormat(Strict):
    """Columns and notation of a file of series; null: the usual names, or as the file shows."""

    id_column: str | None = Field(
        default=None, description="identifies series; several as in 'store,item'"
    )
    time_column: str | None = None
    target_column: str | None = Field(
        default=None,
        description="several that are forecast together as in 'load,price'; or a shell pattern, "
        "such as '*', where each column is a series",
    )
    known_covariates: str | None = Field(
        default=None,
        description="columns with values over the horizon, as in 'promo,holiday'; evaluation alone "
        "reads covariates",
    )
    past_covariates: str | None = Field(
        default=None, description="columns whose values end where a forecast begins"
    )
    frequency: str | None = Field(default=None, description="of pandas; null: from the times")
    date_format: str | None = Field(
        default=None,
        description="of strptime, as in '%d.%m.%Y'; s, ms, us or ns since 1970",
    )
    separator: str | None = Field(default=None, description="one character, or tab")
    decimal: Literal[".", ","] | None = None
    encoding: str = Field(default="utf-8", description="of text, such as cp1252 or utf-16")

    @field_validator(
        "id_column", "target_column", "known_covariates", "past_covariates", mode="before"
    )
    @classmethod
    def _joined(cls, columns: Any) -> Any:
        """A list of columns, as one text."""
        texts = isinstance(columns, list | tuple) and all(isinstance(one, str) for one in columns)
        return ",".join(columns) if texts else columns

    @field_validator("separator")
    @classmethod
    def _one_character(cls, separator: str | None) -> str | None:
        if separator in ("tab", "\\t"):
            return "\t"
        if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
            raise ValueError("a separator is one character, or tab")
        return separator

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, encoding: str) -> str:
        try:
            known = codecs.lookup(encoding).name
            "".encode(known)  # the codecs of bytes, such as base64, are no encodings of text
            return known
        except (LookupError, ValueError):
            raise ValueError(
                f"{encoding!r} is no encoding; such are utf-8, utf-16 and cp1252"
            ) from None


class GivenSeries(SeriesFormat):
    """A file of series to calibrate or train on."""

    hold_out: int = Field(
        default=0, ge=0, description="steps at the end of each series that are left for evaluation"
    )
