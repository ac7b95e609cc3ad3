"""Requests to the Hub with bounds: no endless waits, few and polite retries, no token in a message.

huggingface_hub retries what can be repeated safely, but not everything (not the first look at a
repository, not creating one, not a commit); it sets no timeout on most requests, and sleeps as long
as ``Retry-After`` asks. This module fills these gaps and repeats nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tscompress.errors import HubError, UsageError

T = TypeVar("T")

ATTEMPTS = 3
FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
MAX_BRANCH_BYTES = 250  # git keeps it as the name of a file, with .lock behind it for a moment
_MOST_CONFLICTS = 10
_lock = threading.Lock()
#: Seconds that each thread which is inside would wait.
_patience: list[float] = []
#: What the last to leave calls.
_restore: Callable[[], None] | None = None


class _Conflicts(threading.local):
    count = 0


_conflicts = _Conflicts()
PASSING_STATUS = (408, 429, 500, 502, 503, 504)


def check_endpoint() -> None:
    """Look at ``HF_ENDPOINT`` before huggingface_hub does, which cannot be imported with some.

    Raises
    ------
    UsageError
        It is no address.
    """
    given = os.environ.get("HF_ENDPOINT")
    if not given:
        return
    try:
        parts = urlsplit(given)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is no number
        whole = False
    if not whole:
        shown = "HF_ENDPOINT" if "@" in given else f"HF_ENDPOINT is {given!r}, which"  # a password
        raise UsageError(
            f"{shown} is no address; set it to one such as https://huggingface.co, or unset it."
        )


def shown_endpoint() -> str:
    """The address of the Hub, without the user and the password that it may hold."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


@contextmanager
def bounded_requests(timeout_seconds: float) -> Iterator[None]:
    """Inside, huggingface_hub waits at most this long for an answer.

    A server that asks for a longer pause than a minute is an error, not a long sleep. Several
    threads wait as long as the most patient of them, and the last one removes the bounds: a new
    client would close the one before.

    Raises
    ------
    UsageError
        The token cannot be one.
    HubError
        A ``Retry-After`` is longer than that.
    """
    global _restore
    _check_token()
    with _lock:
        if not _patience:
            _restore = _bound()
        _patience.append(timeout_seconds)
        _conflicts.count = 0
    try:
        yield
    finally:
        with _lock:
            _patience.remove(timeout_seconds)
            if not _patience and _restore is not None:
                _restore()


def _bound() -> Callable[[], None]:
    """Make huggingface_hub's next client a bounded one; returns what undoes it."""
    from huggingface_hub.utils import _http

    checks = (_refuse_long_pause, _refuse_endless_conflict)
    module: Any = _http
    bound: Callable[..., Any] = _bound_client
    if hasattr(module, "set_client_factory"):
        configure, make = module.set_client_factory, module._GLOBAL_CLIENT_FACTORY
    else:  # before version 1: requests
        configure, make = module.configure_http_backend, module._GLOBAL_BACKEND_FACTORY
        bound = _bound_session
    configure(lambda: bound(make(), checks))
    return lambda: configure(make)


def _check_token() -> None:
    from huggingface_hub import get_token

    token = get_token()
    if token is not None and not re.fullmatch("[!-~]+", token):  # headers are ASCII
        raise UsageError(
            "the token of HF_TOKEN, or of `hf auth login`, has letters or spaces that no token "
            "has; set HF_TOKEN to the token alone."
        )


Check = Callable[..., None]


def _bound_client(client: Any, checks: tuple[Check, ...]) -> Any:
    """A client of httpx with bounds."""

    def bound(request: Any) -> None:
        # Some calls pass None, which would override a timeout of the client.
        given = request.extensions.get("timeout") or {}
        kinds = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {
            kind: _seconds() if given.get(kind) is None else given[kind] for kind in kinds
        }

    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], bound],
        "response": [*hooks["response"], *checks],
    }
    return client


def _bound_session(session: Any, checks: tuple[Check, ...]) -> Any:
    """A session of requests with bounds; it has no timeout of its own to set."""
    for prefix, adapter in list(session.adapters.items()):
        session.mount(prefix, _ImpatientAdapter(adapter))
    session.hooks["response"] += checks
    return session


@dataclass
class _ImpatientAdapter:
    """An adapter of requests that sets a timeout where a call has none."""

    adapter: Any

    def send(self, request: Any, **options: Any) -> Any:
        if options.get("timeout") is None:
            options["timeout"] = _seconds()
        return self.adapter.send(request, **options)

    def close(self) -> None:
        self.adapter.close()


def _seconds() -> float:
    return max(_patience, default=LONGEST_WAIT_SECONDS)


def _refuse_endless_conflict(response: Any, **_: Any) -> None:
    """Where the Hub is busy with the owner's other requests, create_repo asks again at once and
    for ever.
    """
    path = urlsplit(str(response.url)).path
    _conflicts.count += response.status_code == 409 and path.endswith("/repos/create")
    if _conflicts.count > _MOST_CONFLICTS:
        raise HubError("the Hub is busy with other requests of the same owner; try again later.")


def _refuse_long_pause(response: Any, **_: Any) -> None:
    wait = pause_seconds(response)
    if wait is not None and wait > LONGEST_WAIT_SECONDS:
        raise HubError(
            f"the Hub answered with HTTP status {response.status_code} and asks to wait "
            f"{wait:.0f} seconds; run it again then."
        )


def pause_seconds(response: Any) -> float | None:
    """Seconds of ``Retry-After``, a number or a date; None without one."""
    said = str(response.headers.get("Retry-After") or "").strip()
    if said.isdigit():
        return float(said)
    try:
        until = parsedate_to_datetime(said)
    except (TypeError, ValueError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=timezone.utc)
    return max(0.0, (until - datetime.now(timezone.utc)).total_seconds())


def with_retries(
    call: Callable[[], T],
    *,
    before: Callable[[], None] = lambda: None,
    retry_on: Callable[[BaseException], bool] | None = None,
) -> T:
    """``call()``, repeated where the failure is of the passing kind; the last error is raised.

    Waits as long as ``Retry-After`` asks, or 1, 2, 4 … seconds. ``before()`` comes before each
    attempt; it retries by itself, so its errors end it all.
    """
    may_retry = retry_on or is_passing
    for attempt in range(1, ATTEMPTS):
        before()
        try:
            return call()
        except Exception as error:
            response = response_of(error)
            asked = None if response is None else pause_seconds(response)
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1) if asked is None else asked
            if not may_retry(error) or wait > LONGEST_WAIT_SECONDS:
                raise
        time.sleep(wait)
    before()
    return call()


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a moment later."""
    status = status_of(error)
    if status is not None:
        return status in PASSING_STATUS
    return is_cut(error) or any(isinstance(e, json.JSONDecodeError) for e in chain(error))


def is_cut(error: BaseException) -> bool:
    """Whether a connection that stood was cut."""
    kinds = _kinds("RemoteProtocolError", "ReadError", "WriteError")
    return any(isinstance(e, (*kinds, ConnectionResetError, BrokenPipeError)) for e in chain(error))


def is_timeout(error: BaseException) -> bool:
    """Whether the other side stayed silent."""
    return any(isinstance(e, (*_kinds("TimeoutException"), TimeoutError)) for e in chain(error))


def is_network(error: BaseException) -> bool:
    """Whether it never came to an answer: no name, no route, no listener, silence, a cut."""
    kinds = (*_kinds("TransportError"), ConnectionError, TimeoutError)
    return any(
        isinstance(e, kinds) or type(e).__module__.startswith("requests.") for e in chain(error)
    )


def network_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises on purpose or not: of httpx, of requests (OSErrors), of its own
    checks and of answers that are no JSON (ValueErrors), around uploads (RuntimeErrors).
    """
    return (*_kinds("HTTPError"), OSError, ValueError, RuntimeError)


def _kinds(*names: str) -> tuple[type[Exception], ...]:
    """Classes of httpx; none where huggingface_hub is older and speaks requests."""
    with contextlib.suppress(ImportError):
        import httpx

        return tuple(getattr(httpx, name) for name in names)
    return ()


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error, or what caused it, came with."""
    response = response_of(error)
    return None if response is None else int(response.status_code)


def response_of(error: BaseException) -> Any:
    """The response that an error, or what caused it, came with; None if there was none."""
    found = (getattr(e, "response", None) for e in chain(error))
    return next((response for response in found if response is not None), None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from: uploads wrap what really happened."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def one_line(text: object) -> str:
    """A message on one line, without the user's token and without passwords in addresses."""
    from huggingface_hub import get_token

    line = re.sub(r"(?<=://)[^/\s'\"]*@", "", " ".join(str(text).split()))
    token = get_token()
    return line.replace(token, "***") if token else line


def is_branch_name(text: str) -> bool:
    """Whether git takes it for the name of a branch (git-check-ref-format), and the Hub too."""
    parts = text.split("/")
    return (
        text.isprintable()
        and len(text.encode()) <= MAX_BRANCH_BYTES
        and not re.search(r"[ ~^:?*\[\\]|\.\.|@\{|\.\Z|\A-", text)
        and not any(part == "" or part.startswith(".") or part.endswith(".lock") for part in parts)
        and text != "HEAD"
        and parts[0] != "refs"  # such as refs/pr/1, which is no branch
    )


def is_commit(revision: object) -> bool:
    """Whether a revision is the whole name of a commit, and no branch or tag."""
    return re.fullmatch("[0-9a-f]{40}", str(revision)) is not None


def is_repo_id(text: str) -> bool:
    """Whether huggingface_hub takes it for the id of a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
