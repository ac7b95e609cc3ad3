"""Locate the directory of a Hub id, a path or a shipped reference."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path, PureWindowsPath

from tscompress.checkpoints.integrity import source_files, weight_files
from tscompress.checkpoints.names import (
    CONFIG_FILE,
    PLAN_FILE,
    PROVENANCE_FILE,
    REFERENCE_PREFIX,
)
from tscompress.data.reading.tables import kind_of
from tscompress.errors import (
    CorruptCheckpointError,
    HubError,
    ModelNotFoundError,
    OfflineError,
    TscompressError,
    UsageError,
)
from tscompress.io.files import user_path
from tscompress.io.hashing import git_hash_of, sha256_of
from tscompress.io.hub_errors import no_hub, reading_errors_in_words
from tscompress.io.network import (
    bounded_requests,
    is_commit,
    is_network,
    is_passing,
    network_errors,
    status_of,
    with_retries,
)
from tscompress.io.untrusted import UnreadableFileError, read_json


def locate(source: str, revision: str | None) -> tuple[Path, str | None]:
    """The directory of a checkpoint and, for a Hub id, its commit.

    Raises
    ------
    ModelNotFoundError
        There is no such directory or reference, or it is a file; or the Hub has no such model.
    UsageError
        A revision is empty, or given for a directory.
    GatedModelError, OfflineError, ModelLoadError
        As :func:`tscompress.io.hub_errors.reading_errors_in_words`.
    """
    if not source.strip():  # Path("") is the current directory
        raise ModelNotFoundError(f"there is no directory {source!r}.")
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~somebody
        raise ModelNotFoundError(f"there is no directory {source!r}: no such user.") from None
    # Path raises for names that are too long.
    if os.path.isdir(path):  # noqa: PTH112
        if revision is not None:
            raise UsageError(f"{source!r} is a directory; a revision goes with a Hub id only.")
        return path, None
    if revision is not None and not revision.strip():
        raise UsageError(f"{revision!r} is no revision; give a branch, tag or commit, or none.")
    if os.path.isfile(path):  # noqa: PTH113
        raise ModelNotFoundError(f"{source!r} is a file; give the directory that holds it.")
    if source.startswith(REFERENCE_PREFIX):
        if revision is not None:
            raise UsageError(f"{source!r} has no revisions; a revision goes with a Hub id only.")
        return reference_directory(source), None
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise ModelNotFoundError(f"there is no directory {source!r}.")
    return _download(source, revision)


def reference_directory(source: str) -> Path:
    """The directory of the shipped checkpoint ``reference/NAME``.

    Raises
    ------
    ModelNotFoundError
        None of that name is shipped.
    """
    root = Path(str(files("tscompress.checkpoints").joinpath("reference")))
    available = sorted(p.parent.name for p in root.glob("*/config.json"))
    name = source.removeprefix(REFERENCE_PREFIX)
    if name not in available:
        shipped = ", ".join(REFERENCE_PREFIX + item for item in available)
        raise ModelNotFoundError(f"there is no {source!r}; shipped: {shipped}.")
    return root / name


def is_reference(source: str) -> bool:
    """Whether it is the name of a checkpoint that tscompress ships."""
    try:
        return source.startswith(REFERENCE_PREFIX) and reference_directory(source).is_dir()
    except ModelNotFoundError:
        return False


def _download(source: str, revision: str | None) -> tuple[Path, str | None]:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    def fetch(*, cached: bool = False) -> Path:
        return Path(
            snapshot_download(
                source,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "README.md"],  # its card has the licence
                ignore_patterns=["*/*"],  # such as the checkpoints of a training
                local_files_only=cached,
            )
        )

    def fetch_or_cached() -> Path:
        """The Hub is asked what a commit holds even where its files are cached.

        A commit does not change: where the Hub is away or refuses, the cached files are it.
        """
        try:
            return with_retries(fetch, retry_on=_worth_another_look)
        except _unanswered() as error:
            refused = isinstance(error, HubError | HfHubHTTPError | FileNotFoundError)
            found = None
            if is_commit(revision) and (refused or is_network(error)):
                with suppress(*network_errors()):
                    found = fetch(cached=True)
            if found is None or not _is_whole(found):
                raise
            return found

    with bounded_requests(constants.HF_HUB_ETAG_TIMEOUT), reading_errors_in_words(source, revision):
        directory = fetch_or_cached()
        if damaged := _remove_damaged_files(directory, source):
            try:
                directory = fetch()
            except network_errors() as error:
                if not (is_network(error) or isinstance(error, FileNotFoundError)):
                    raise
                raise OfflineError(
                    f"{source!r}: {damaged[0]} in the local cache was damaged and removed, and for "
                    f"a new copy {no_hub()}, or give a directory."
                ) from None
            if damaged := _remove_damaged_files(directory, source):
                raise CorruptCheckpointError(
                    f"{source!r}: {damaged[0]} arrived twice with another hash than announced by "
                    "the Hub; it was removed: try again."
                )
    _check_recorded_files(directory, source)
    # snapshots are cached under their commit: .../snapshots/<commit>
    return directory, directory.name


def _is_whole(snapshot: Path) -> bool:
    """Whether a cached snapshot has a config, all of the weights, and a plan if one is recorded."""
    try:
        weights = weight_files(snapshot)
    except TscompressError:
        return False
    needed = [snapshot / CONFIG_FILE, *weights]
    if PLAN_FILE in _recorded_hashes(snapshot):
        needed.append(snapshot / PLAN_FILE)
    return bool(weights) and all(path.is_file() for path in needed)


def _unanswered() -> tuple[type[BaseException], ...]:
    """What is raised where the Hub is away, refuses, or asks to wait for long."""
    return HubError, *network_errors()


def _worth_another_look(error: BaseException) -> bool:
    """Whether an error is transient and was not retried by huggingface_hub (which retries 429,
    except in the first request)."""
    from huggingface_hub.errors import HfHubHTTPError

    return is_passing(error) and not (isinstance(error, HfHubHTTPError) and status_of(error) == 429)


def _remove_damaged_files(directory: Path, source: str) -> list[str]:
    """Remove cached files whose hash differs from the Hub's, and return their names.

    huggingface_hub compares only sizes.
    """
    hash_by_length = {64: sha256_of, 40: git_hash_of}  # of large files, of others
    announced = _announced_hashes(directory, source)
    damaged = []
    for path in sorted(directory.iterdir()):
        expected = announced.get(path.name, "")
        hash_of = hash_by_length.get(len(expected))
        if hash_of is None or not path.is_file() or hash_of(path) == expected:
            continue
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        damaged.append(path.name)
    return damaged


def _announced_hashes(directory: Path, source: str) -> dict[str, str]:
    """File name to the hash announced by the Hub: SHA-256 of large files, git's of others.

    In a cache of links, the hash is the name of the link's target. A cache without links has no
    hashes: the Hub is asked again, and where it is away or refuses, nothing is checked.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    paths = [path for path in directory.iterdir() if path.is_file()]
    known = {path.name: path.resolve().name for path in paths if path.is_symlink()}
    if len(known) < len(paths):
        try:
            listed = list(HfApi().list_repo_tree(source, revision=directory.name))
        except _unanswered():
            return known
        for entry in listed:
            if isinstance(entry, RepoFile):
                known[entry.path] = entry.lfs.sha256 if entry.lfs else entry.blob_id
    return {name: value for name, value in known.items() if re.fullmatch("[0-9a-f]+", value)}


def _check_recorded_files(directory: Path, source: str) -> None:
    """Compare downloaded files with the hashes in provenance.json, if there is one.

    Raises
    ------
    CorruptCheckpointError
    """
    recorded = _recorded_hashes(directory)
    for path in [*source_files(directory), directory / PLAN_FILE]:
        expected = recorded.get(path.name)
        if expected is not None and path.is_file() and sha256_of(path) != expected:
            raise CorruptCheckpointError(
                f"{source!r}: {path.name} does not have its sha256 of {PROVENANCE_FILE}; it was "
                "changed or damaged: ask its author."
            )


def _recorded_hashes(directory: Path) -> dict[str, str]:
    """File name to the hash in provenance.json; nothing where that is not there, or damaged."""
    try:
        record = read_json(directory / PROVENANCE_FILE)["sha256"]
        return {str(name): str(value) for name, value in record.items()}
    except (FileNotFoundError, UnreadableFileError, KeyError, TypeError, AttributeError):
        return {}


def is_local_path(text: str) -> bool:
    """Whether a value of a recipe is a path on somebody's machine, of Windows as well.

    ``owner/name`` is on the Hub unless there is such a directory.
    """
    path = Path(text)
    if (path.name == text and "\\" not in text) or is_reference(text):
        return False
    return (
        text.startswith((".", "~"))
        or path.is_absolute()
        or "\\" in text
        or PureWindowsPath(text).is_absolute()
        or len(path.parts) > 2
        or bool(kind_of(path))
        or path.suffix.lower() in (".yaml", ".yml")
        or os.path.exists(text)  # noqa: PTH110  (Path raises for names that are too long)
    )


def bare_name(path: str) -> str:
    """The last part of a path, of Windows as well."""
    return PureWindowsPath(Path(path).name).name or path


def model_name(source: str) -> str:
    """The Hub id, ``reference/...``, or the name of the directory."""
    path = user_path(source)
    return path.resolve().name if os.path.isdir(path) else source  # noqa: PTH112
