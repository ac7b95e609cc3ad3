"""What the Hub refuses and what cuts a transfer, in words: for reading a model and for a push."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tscompress.errors import (
    GatedModelError,
    HubError,
    ModelLoadError,
    ModelNotFoundError,
    OfflineError,
    TscompressError,
)
from tscompress.io.network import (
    chain,
    is_cut,
    is_network,
    is_timeout,
    network_errors,
    one_line,
    shown_endpoint,
    status_of,
)


@contextmanager
def reading_errors_in_words(source: str, revision: str | None) -> Iterator[None]:
    """Within, what keeps a model from being read from the Hub becomes one line of ours.

    Raises
    ------
    GatedModelError, ModelNotFoundError
        The Hub refused.
    OfflineError
        It could not be reached.
    ModelLoadError
        Anything else.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise GatedModelError(
            f"{source!r} is gated; ask for access on its Hub page and run `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{source!r} has no revision {revision!r} on the Hub.") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"{source!r} is neither a directory nor a model on the Hub that you may read; "
            "check the spelling, or run `hf auth login` if it is private."
        ) from None
    except HFValidationError:
        raise ModelNotFoundError(
            f"{source!r} is neither a directory nor a Hub id such as 'amazon/chronos-bolt-small'."
        ) from None
    except network_errors() as error:
        raise _reading_error(error, source) from None


def no_hub() -> str:
    """Why the Hub does not answer, and what to do."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set; unset it"
    return "the Hub cannot be reached; connect"


def _reading_error(error: BaseException, source: str) -> TscompressError:
    """Of a model, where the Hub did not name the reason."""
    from huggingface_hub.errors import FileMetadataError

    status = status_of(error)
    if status == 401:
        return GatedModelError(
            f"the Hub does not accept your token (HTTP status 401, for {source!r}); "
            "run `hf auth login` or set HF_TOKEN."
        )
    if status is not None:
        return ModelLoadError(
            f"the Hub answered {source!r} with HTTP status {status}; try again later."
        )
    if any(isinstance(e, FileMetadataError) for e in chain(error)):
        return ModelLoadError(f"{source!r} could not be had: {one_line(error)}")
    if is_network(error) or isinstance(error, FileNotFoundError):
        return OfflineError(
            f"{source!r} is no directory here and not in the local cache, and {no_hub()}, or give "
            "a directory."
        )
    return ModelLoadError(f"{source!r} did not arrive whole: {one_line(error)} Try again.")


@dataclass(frozen=True)
class Push:
    """Where a push goes, as far as its errors name it."""

    repo_id: str
    create_pr: bool
    timeout_seconds: float


@contextmanager
def push_errors_in_words(doing: str, push: Push) -> Iterator[None]:
    """Within, what keeps a push from the Hub becomes one line of ours.

    Parameters
    ----------
    doing
        The step, such as "the commit".

    Raises
    ------
    HubError
    """
    try:
        yield
    except network_errors() as error:
        ours = next((e for e in chain(error) if isinstance(e, TscompressError)), None)
        if ours is not None:  # raised by a bound of ours, wrapped by an upload
            raise ours from None
        reason = _refusal(error, push) or _interruption(error, push) or one_line(error)
        raise HubError(f"{doing} of {push.repo_id!r} failed: {reason}") from error


def _refusal(error: BaseException, push: Push) -> str | None:
    """Why the Hub refused; None if it did not answer."""
    from huggingface_hub.errors import GatedRepoError

    status = status_of(error)
    if any(isinstance(e, GatedRepoError) for e in chain(error)):
        return "it is gated; ask for access on its Hub page, then run it again."
    if status == 401:
        return (
            "the Hub does not accept the token (HTTP status 401); run `hf auth login`, or set "
            "HF_TOKEN to a valid one."
        )
    if status == 403:
        owner = push.repo_id.rpartition("/")[0] or "your account"
        way_out = "" if push.create_pr else ", or push with --pr"
        return (
            "the token may not write there (HTTP status 403); use one with write access to "
            f"{owner!r}{way_out}."
        )
    if status == 404:
        return (
            "there is no such repository or branch that the token sees (HTTP status 404); "
            "check the names."
        )
    if status in (409, 412):
        return (
            f"something else changed it at the same time (HTTP status {status}); nothing was "
            "committed: run it again."
        )
    if status == 429:
        return "too many requests (HTTP status 429); wait some minutes and run it again."
    if status is not None and status >= 500:
        return f"the Hub answered with HTTP status {status} each time; try again later."
    return None if status is None else f"HTTP status {status}: {one_line(error)}"


def _interruption(error: BaseException, push: Push) -> str | None:
    """What came between; None if it was no matter of the network."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if any(isinstance(e, OfflineModeIsEnabled) for e in chain(error)):
        return "HF_HUB_OFFLINE is set; unset it."
    if push.create_pr and (is_timeout(error) or is_cut(error)):
        return (
            "the connection was lost before the answer came; look at "
            f"{shown_endpoint()}/{push.repo_id}/discussions whether the pull request is "
            "there before running it again."
        )
    if is_timeout(error):
        return (
            f"the Hub said nothing for {push.timeout_seconds:g} seconds; run it again, or "
            "with a longer --timeout."
        )
    if is_cut(error):
        return "the connection was cut; what is uploaded is kept there: run it again."
    return "the Hub cannot be reached; connect and run it again." if is_network(error) else None
