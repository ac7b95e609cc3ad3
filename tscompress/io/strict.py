"""The base of settings and records: unknown keys are refused, and nothing changes later."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A pydantic model without unknown keys, which is not changed once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)
