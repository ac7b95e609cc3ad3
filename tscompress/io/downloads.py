"""One file of a public registry: bounded in size and time, few retries, kept by its hash.

Nothing of a file is run, and none is used whose SHA-512 is not the one that the code names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
import urllib.error
import urllib.request
import warnings
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from tscompress.errors import DownloadError
from tscompress.io.files import cache_directory
from tscompress.io.network import PASSING_STATUS, with_retries

_TIMEOUT_SECONDS = 30.0
_BLOCK_BYTES = 2**20


def fetched(url: str, integrity: str, *, limit_bytes: int, instead: str) -> bytes:
    """A file, from the cache or else from its address.

    Parameters
    ----------
    url
        http or https; its last part names the file in the cache.
    integrity
        ``sha512-`` and the digest in base64, as npm writes it.
    limit_bytes
        A larger file is refused.
    instead
        What to do where it cannot be had, the end of a message.

    Raises
    ------
    DownloadError
        It cannot be reached, is too large, or is another file.
    """
    kept = cache_directory() / "downloads" / url.rpartition("/")[2]
    try:
        content = kept.read_bytes()
        if has_integrity(content, integrity):
            return content
    except OSError:
        pass
    content = _downloaded(url, limit_bytes, instead)
    if not has_integrity(content, integrity):
        raise DownloadError(
            f"what {_host(url)} gave as {kept.name} has another sha512 than the published file; "
            f"nothing of it was used: {instead}."
        )
    _keep(kept, content)
    return content


def has_integrity(content: bytes, integrity: str) -> bool:
    """Whether content has the SHA-512 that npm writes as ``sha512-`` and base64."""
    digest = base64.b64encode(hashlib.sha512(content).digest()).decode()
    return integrity == f"sha512-{digest}"


def _downloaded(url: str, limit_bytes: int, instead: str) -> bytes:
    try:
        return with_retries(lambda: _read(url, limit_bytes, instead), retry_on=_is_passing)
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"HTTP status {error.code}"
    except urllib.error.URLError as error:
        reason = str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = " ".join(reason.split())[:160]
    raise DownloadError(
        f"{url.rpartition('/')[2]} cannot be fetched from {_host(url)} ({reason}); {instead}."
    ) from None


def _read(url: str, limit_bytes: int, instead: str) -> bytes:
    found = bytearray()
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
        while block := answer.read(_BLOCK_BYTES):
            found += block
            if len(found) > limit_bytes:
                raise DownloadError(
                    f"{url.rpartition('/')[2]} of {_host(url)} has more than {limit_bytes:,} "
                    f"bytes and is another file; {instead}."
                )
    return bytes(found)


def _is_passing(error: BaseException) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code in PASSING_STATUS
    return isinstance(error, (ConnectionResetError, HTTPException))


def _host(url: str) -> str:
    return urlsplit(url).hostname or "the registry"


def _keep(target: Path, content: bytes) -> None:
    """Into the cache, in one step; a cache that cannot be written is a warning."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".download.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            Path(temporary).replace(target)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{target.name} is not kept for a later run: {error.strerror or error}. Set "
            "TSCOMPRESS_CACHE to a directory that can be written.",
            stacklevel=2,
        )
