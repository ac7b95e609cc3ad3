"""Every error that tscompress raises on purpose.

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
    exit_code = 2


class RecipeError(UsageError):
    pass


class PlanError(UsageError):
    pass


class OutputExistsError(UsageError):
    pass


class ModelLoadError(TscompressError):
    pass


class ModelNotFoundError(ModelLoadError):
    pass


class GatedModelError(ModelLoadError):
    pass


class OfflineError(ModelLoadError):
    pass


class UnsupportedModelError(ModelLoadError):
    pass


class CorruptCheckpointError(ModelLoadError):
    pass


class DataError(TscompressError):
    pass


class LeakError(TscompressError):
    pass


class FactorizationError(TscompressError):
    pass


class DivergenceError(TscompressError):
    pass


class NotEnoughMemoryError(TscompressError):
    pass


class OutputError(TscompressError, OSError):
    """Also an OSError: callers may treat it as any other trouble with a disk.

    ``reason`` is the message without the path, for who knows a better one.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class HubError(TscompressError):
    pass


class VerificationError(TscompressError):
    pass
