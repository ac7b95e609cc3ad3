"""Errors of tscompress.

TscompressError
├── UsageError                  what was asked for is not allowed             (exit code 2)
│   ├── RecipeError             a recipe or an option has a wrong key, type or value
│   ├── PlanError               a plan does not fit the model it is applied to
│   └── OutputExistsError       the target is there already and --force was not given
├── ModelLoadError              a checkpoint could not be read                (exit code 1)
│   ├── ModelNotFoundError      no such directory, Hub id or revision
│   ├── GatedModelError         the Hub asks for permission or a token
│   ├── OfflineError            the Hub could not be reached
│   ├── UnsupportedModelError   a family that tscompress does not know
│   └── CorruptCheckpointError  truncated, inconsistent or non-finite weights
├── DataError                   series that cannot be read or used
├── LeakError                   evaluation data offered for training or calibration
├── FactorizationError          a decomposition that failed; names the layer
├── DivergenceError             a training loss that is no longer finite
├── NotEnoughMemoryError        a single series does not fit beside the model
├── OutputError                 a file or directory that cannot be written: disk full, read-only
├── HubError                    the Hub refused a push, or could not be reached for it
├── DownloadError               a file of a registry that cannot be had, or is another one
└── VerificationError           a saved checkpoint that does not load back bit-equal
"""

from __future__ import annotations

import re

#: Of what a message repeats, longer than any name or most paths: its ends are shown.
_ENDLESS = re.compile(r"(\S{160})\S{240,}(\S{80})")


def shortened(message: str) -> str:
    """A message without the middle of words that have no end, such as a name of 5000 letters."""
    return _ENDLESS.sub(r"\1…\2", message)


class TscompressError(Exception):
    """Base class. The message is one line: what came, what is allowed, what to do."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class UsageError(TscompressError):
    """What was asked for is not allowed (exit code 2)."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe or an option has a wrong key, type or value."""


class PlanError(UsageError):
    """A plan does not fit the model that it is applied to."""


class OutputExistsError(UsageError):
    """The target exists and ``--force`` was not given."""


class ModelLoadError(TscompressError):
    """A checkpoint could not be read."""


class ModelNotFoundError(ModelLoadError):
    """There is no such directory, Hub id or revision."""


class GatedModelError(ModelLoadError):
    """The Hub asks for permission or a token."""


class OfflineError(ModelLoadError):
    """The Hub could not be reached."""


class UnsupportedModelError(ModelLoadError):
    """The model is of a family that tscompress does not support."""


class CorruptCheckpointError(ModelLoadError):
    """Weights or configs are truncated, inconsistent or not finite."""


class DataError(TscompressError):
    """Series cannot be read or used."""


class LeakError(TscompressError):
    """Evaluation series were given for training or calibration."""


class FactorizationError(TscompressError):
    """A decomposition failed; the message names the layer."""


class DivergenceError(TscompressError):
    """A training loss is not finite."""


class NotEnoughMemoryError(TscompressError):
    """A single series does not fit into memory beside the model."""


class OutputError(TscompressError, OSError):
    """A file or directory cannot be written: the disk is full, or it is read-only. Also an OSError.

    ``reason`` is the message without the path.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class HubError(TscompressError):
    """The Hub refused a push or could not be reached for it."""


class DownloadError(TscompressError):
    """A file of a public registry cannot be had, or is not the published one."""


class VerificationError(TscompressError):
    """A saved checkpoint does not load back bit-equal."""
