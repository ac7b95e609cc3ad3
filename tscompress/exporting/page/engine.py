"""The engine of a page: onnxruntime-web as WebAssembly, of the npm registry, pinned and hashed.

The package is read as an archive; none of its scripts is run here.
"""

from __future__ import annotations

import io
import os
import tarfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from tscompress.errors import UsageError
from tscompress.io.downloads import fetched, has_integrity
from tscompress.io.files import user_path

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
#: As the npm registry publishes it for this version.
INTEGRITY = (
    "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8p"
    "ZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
)

_REGISTRY = "https://registry.npmjs.org/"
_LIMIT_BYTES = 2**26
_MEMBERS = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
_INSTEAD = (
    f"where there is a network, `npm pack {PACKAGE}@{VERSION}` gets the file, which "
    "--onnxruntime-web takes"
)
#: Beside the module of the installed onnxruntime, which is built from the same sources.
_NOTICES = ("LICENSE", "ThirdPartyNotices.txt")


@dataclass(frozen=True)
class Engine:
    """Files of the package.

    Attributes
    ----------
    script
        ``ort``, a plain script.
    module
        What starts the WebAssembly, a module of JavaScript.
    wasm
        The WebAssembly.
    """

    script: bytes
    module: bytes
    wasm: bytes


def find_engine(tarball: str | Path | None = None) -> Engine:
    """The pinned version, from a file, the cache, or the registry.

    Parameters
    ----------
    tarball
        ``onnxruntime-web-VERSION.tgz``, as ``npm pack`` writes it.

    Raises
    ------
    UsageError
        The file cannot be read or is another one, or the address of the registry is none.
    DownloadError
        The registry cannot be reached, or gives another file.
    """
    return _engine_in(_fetched() if tarball is None else _given(user_path(tarball)))


def notices() -> dict[str, bytes]:
    """Licence of the engine and of what is built into it, by the name of a file."""
    spec = find_spec("onnxruntime")
    places = (spec.submodule_search_locations or []) if spec else []
    found = [Path(place, name) for place in places for name in _NOTICES]
    return {path.name: path.read_bytes() for path in found if path.is_file()}


def registry() -> str:
    """Address of the npm registry, with a slash behind: npm's own setting, or the public one.

    Raises
    ------
    UsageError
        It is no address.
    """
    names = ("NPM_CONFIG_REGISTRY", "npm_config_registry")
    given = next(filter(None, map(os.environ.get, names)), _REGISTRY)
    try:
        parts = urlsplit(given)
        usable = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    except ValueError:
        usable = False
    if not usable or not given.isascii() or not given.isprintable() or " " in given:
        raise UsageError(
            "NPM_CONFIG_REGISTRY is no address such as https://registry.npmjs.org/ without user "
            f"and password; {_INSTEAD}."
        )
    return f"{given.rstrip('/')}/"


def _fetched() -> bytes:
    url = f"{registry()}{PACKAGE}/-/{PACKAGE}-{VERSION}.tgz"
    return fetched(url, INTEGRITY, limit_bytes=_LIMIT_BYTES, instead=_INSTEAD)


def _given(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--onnxruntime-web {str(path)!r} cannot be read: {reason}.") from None
    if not has_integrity(content, INTEGRITY):
        raise UsageError(
            f"--onnxruntime-web {str(path)!r} is not {PACKAGE} {VERSION} as published (another "
            f"sha512); `npm pack {PACKAGE}@{VERSION}` gets that."
        )
    return content


def _engine_in(content: bytes) -> Engine:
    """Three files of an archive whose hash is known; nothing else of it is unpacked."""
    wanted = {f"package/dist/{name}": name for name in _MEMBERS}
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name in wanted else None
            if stream is not None:
                found[wanted[member.name]] = stream.read()
    return Engine(*(found[name] for name in _MEMBERS))
