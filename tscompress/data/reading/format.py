"""Columns and notation of a file of series; what is not given is found in the file, or refused."""

from __future__ import annotations

import codecs
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

ID_COLUMNS = ("item_id", "id", "unique_id", "series_id", "series")
TIME_COLUMNS = ("timestamp", "time", "ds", "date", "datetime")
TARGET_COLUMNS = ("target", "y", "value")


class SeriesFormat(BaseModel):
    """Columns and notation of a file of series; null: the usual names, or as the file shows."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id_column: str | None = Field(
        default=None, description="tells series apart; several as in 'store,item'"
    )
    time_column: str | None = None
    target_column: str | None = Field(
        default=None, description="or a shell pattern, such as '*', where each column is a series"
    )
    frequency: str | None = Field(default=None, description="of pandas; null: from the times")
    date_format: str | None = Field(
        default=None,
        description="of strptime, as in '%d.%m.%Y'; s, ms, us or ns since 1970",
    )
    separator: str | None = Field(default=None, description="one character, or tab")
    decimal: Literal[".", ","] | None = None
    encoding: str = Field(default="utf-8", description="of text, such as cp1252 or utf-16")

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
            return codecs.lookup(encoding).name
        except (LookupError, ValueError):
            raise ValueError(
                f"{encoding!r} is no encoding; such are utf-8, utf-16 and cp1252"
            ) from None


class GivenSeries(SeriesFormat):
    """A file of series to calibrate or train on."""

    hold_out: int = Field(
        default=0, ge=0, description="steps at the end of each series that are left for evaluation"
    )
