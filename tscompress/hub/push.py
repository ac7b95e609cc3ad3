"""Pushing a compressed checkpoint to the Hub: verified, with a card, in one commit.

Only files that tscompress knows go up, and only from a directory that it wrote, that holds what it
wrote, and that forecasts. The token comes from where huggingface_hub looks for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled
from yaml import YAMLError

from tscompress.checkpoints.integrity import weight_files
from tscompress.checkpoints.load import load
from tscompress.checkpoints.names import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    PLAN_FILE,
    PROVENANCE_FILE,
    WEIGHTS_FILE,
)
from tscompress.errors import (
    CorruptCheckpointError,
    HubError,
    TscompressError,
    UsageError,
    VerificationError,
)
from tscompress.hub.card import CARD_FILE, card_by_hand, card_of, licence_of, measured_of
from tscompress.hub.card_scores import CardScores, about_measurements
from tscompress.hub.origin import Made, read_made
from tscompress.io.files import sha256_of, user_path, write_text_atomically
from tscompress.io.network import (
    bounded_requests,
    chain,
    is_branch_name,
    is_cut,
    is_network,
    is_passing,
    is_repo_id,
    is_timeout,
    network_errors,
    one_line,
    status_of,
    with_retries,
)
from tscompress.io.untrusted import UnreadableFileError, regular_file, single_line
from tscompress.training.pretraining import PRETRAIN_FILE
from tscompress.workflows.save import RECIPE_FILE, RECOVERY_FIGURE_FILE, RECOVERY_LOG_FILE

#: What may go up besides the weights; anything else in the directory stays at home.
_RECORDS = (
    CONFIG_FILE, GENERATION_FILE, PLAN_FILE, RECIPE_FILE, PRETRAIN_FILE, PROVENANCE_FILE,
    RECOVERY_LOG_FILE, RECOVERY_FIGURE_FILE, INDEX_FILE,
)  # fmt: skip
_MAX_RECORD_BYTES = 64 * 2**20
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
DEFAULT_TIMEOUT_SECONDS = 60.0
_LONGEST_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True)
class PushResult:
    """What :func:`push` did, or with ``dry_run`` would do.

    Attributes
    ----------
    files
        Name and size in bytes of everything that goes up.
    left_behind
        Other files in the directory.
    notes
        What the user should know, a sentence each.
    commit, url
        The commit and its page; None after a dry run.
    pull_request
        The page of the pull request, where one was asked for.
    """

    repo_id: str
    files: Mapping[str, int]
    left_behind: tuple[str, ...]
    notes: tuple[str, ...]
    card: str
    commit: str | None = None
    url: str | None = None
    pull_request: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def push(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    branch: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
    message: str | None = None,
    scores: CardScores | None = None,
    bench: Mapping[str, Any] | None = None,
    force: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> PushResult:
    """Verify a compressed checkpoint, write its card, and push both in one commit.

    The directory is loaded and asked for a forecast, and the hashes in ``provenance.json`` are
    compared, before anything goes up; what goes up is what was compared, even if something else
    takes its place meanwhile. The repository is created if it is not there.

    Parameters
    ----------
    directory
        What ``compress``, ``recover`` or ``run`` wrote, or the model that ``pretrain`` trained.
    repo_id
        ``owner/name``, or a name below the token's owner.
    private
        Create the repository as a private one; refused if it exists and is public.
    branch
        Commit to this branch, which is created if it is not there.
    create_pr
        Open a pull request instead; the repository may be someone else's.
    dry_run
        Touch no network and write nothing: say what would go up.
    message
        Of the commit.
    scores, bench
        For the card; by default what ``tscompress run`` left above the directory.
    force
        Write the card even over one that was written by hand.
    timeout_seconds
        How long the Hub may stay silent; a day at most.

    Raises
    ------
    UsageError
        No such directory, not written by tscompress, not a repository id, measurements of another
        model, a token in what would be published, or options that do not go together.
    CorruptCheckpointError, VerificationError
        The directory does not load, does not forecast, holds other files than were written, or
        changed on the way.
    HubError
        The Hub refused, or could not be reached.
    """
    directory = user_path(directory)
    message = message or f"Push {directory.resolve().name}, made by tscompress"
    _refuse_secrets({"the commit message": message, "the branch": branch or "", "the id": repo_id})
    _check_request(repo_id, branch, create_pr, timeout_seconds)
    records = _read_records(directory)
    made = read_made(directory)
    _refuse_secrets({name: content.decode(errors="replace") for name, content in records.items()})
    contents, notes = _verified(made, records)
    notes += _about_local_paths(made)
    _check_forecast(directory)
    licence = licence_of(made, fetch=not dry_run)
    if not licence and made.base is None:
        notes.append(
            f"a model trained from scratch has the licence that you give it in {CARD_FILE}"
        )
    elif not licence and made.base is not None:
        notes.append(f"the licence of {made.base.source!r} is not known here; the card has none")
    card = card_by_hand(directory / CARD_FILE, force=force)
    by_hand = card is not None
    if card is None:
        scores, bench = measured_of(made, scores, bench)
        card = str(card_of(made, repo_id, scores=scores, bench=bench, licence=licence))
        notes += about_measurements(made, repo_id, scores, bench)
    else:
        _check_is_card(card, directory)
        notes.append(f"{CARD_FILE} was written by hand and goes up as it is; --force writes anew")
    _refuse_secrets({CARD_FILE: card})
    sizes = {CARD_FILE: len(card.encode())} | contents.sizes
    left = tuple(sorted(p.name for p in directory.iterdir() if p.name not in sizes))
    planned = PushResult(repo_id, sizes, left, tuple(notes), card)
    if dry_run:
        return planned
    contents.check_state()
    if not by_hand:
        write_text_atomically(directory / CARD_FILE, card)
    upload = _Upload(repo_id, contents, card, message, branch, create_pr, private, timeout_seconds)
    repo_id, done = upload.run()
    return PushResult(
        repo_id, sizes, left, tuple(notes), card, done.oid, done.commit_url, done.pr_url
    )


# --------------------------------------------------------------------------------------------------
# Whether it may go up
# --------------------------------------------------------------------------------------------------


def _check_request(
    repo_id: str, branch: str | None, create_pr: bool, timeout_seconds: float
) -> None:
    if not is_repo_id(repo_id):
        raise UsageError(
            f"{one_line(repr(repo_id))} is not the id of a repository; give owner/name of letters, "
            "digits, '-', '_' and '.', 96 at most."
        )
    if branch is not None and create_pr:
        raise UsageError("a pull request is made against the main branch; give --branch or --pr.")
    if branch is not None and not is_branch_name(branch):
        raise UsageError(
            f"{single_line(repr(branch))} is not the name of a branch; give one such as "
            "small/fold, without spaces, '..' or any of ~^:?*[\\, 250 bytes at most."
        )
    if not 0 < timeout_seconds <= _LONGEST_TIMEOUT_SECONDS:  # nor NaN
        raise UsageError(
            f"the timeout is {timeout_seconds:g} seconds; it must be above 0 and at most "
            f"{_LONGEST_TIMEOUT_SECONDS:.0f}, which is a day."
        )


@dataclass(frozen=True)
class _Contents:
    """What goes up besides the card, as it was when it was verified.

    Attributes
    ----------
    records
        Small files, in memory.
    weights
        Paths of large ones, with which goes what tells each from another file in its place.
    """

    records: Mapping[str, bytes]
    weights: Mapping[str, _Weights]

    @property
    def sizes(self) -> dict[str, int]:
        """In bytes."""
        small = {name: len(content) for name, content in self.records.items()}
        return small | {name: found.state[0] for name, found in self.weights.items()}

    def check_state(self) -> None:
        """Raises VerificationError if weights were replaced or written to since."""
        for found in self.weights.values():
            if not found.path.is_file() or _state(found.path) != found.state:
                raise _changed(found.path)

    def check_hash(self, name: str, sha256: str) -> None:
        """Raises VerificationError if the weights that were sent have another hash."""
        if sha256 != self.weights[name].sha256:
            raise _changed(self.weights[name].path)


@dataclass(frozen=True)
class _Weights:
    """One weight file: its hash, and its size, inode and time, which are looked at sooner."""

    path: Path
    state: tuple[int, int, int]
    sha256: str

    @classmethod
    def of(cls, path: Path) -> _Weights:
        state = _state(path)  # before the hash: what changes while it is taken is noticed later
        return cls(path, state, sha256_of(path))


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_ino, found.st_mtime_ns


def _changed(path: Path) -> VerificationError:
    return VerificationError(
        f"{path.name} in {str(path.parent)!r} changed while it was being pushed; nothing was "
        "committed: run it again when nothing writes there."
    )


def _read_records(directory: Path) -> dict[str, bytes]:
    """The small files that may go up, read once: what is looked at is what is sent.

    Raises
    ------
    UsageError
        One is a link or no file.
    CorruptCheckpointError
        One is far too large, or may not be read.
    """
    found = {}
    for path in (directory / name for name in _RECORDS):
        if not path.exists() and not path.is_symlink():
            continue
        _check_is_file(path)
        try:
            regular_file(path, _MAX_RECORD_BYTES)
            found[path.name] = path.read_bytes()
        except (UnreadableFileError, OSError) as error:
            raise CorruptCheckpointError(f"{str(path)!r} cannot be read: {error}.") from None
    return found


def _check_is_file(path: Path) -> None:
    """A link may lead to anything on this machine."""
    if path.is_symlink() or not path.is_file():
        raise UsageError(f"{str(path)!r} is a link or no file; put the file itself there.")


def _verified(made: Made, records: Mapping[str, bytes]) -> tuple[_Contents, list[str]]:
    """Compare what is there with what was written; notes about what was not recorded.

    Raises
    ------
    CorruptCheckpointError
        Nothing shows what was written.
    VerificationError
        A file differs from what was written, or is gone.
    UsageError
        Weights are a link.
    """
    directory = made.directory
    recorded = made.provenance.get("sha256")
    paths = weight_files(directory)
    if not isinstance(recorded, dict) or not paths or not {p.name for p in paths} <= {*recorded}:
        raise CorruptCheckpointError(
            f"{PROVENANCE_FILE} of {str(directory)!r} has no sha256 of {WEIGHTS_FILE}, so nothing "
            "shows that these are the weights that were verified; compress again."
        )
    for path in paths:
        _check_is_file(path)
    weights = {path.name: _Weights.of(path) for path in paths}
    found = {name: hashlib.sha256(content).hexdigest() for name, content in records.items()}
    found |= {name: one.sha256 for name, one in weights.items()}
    for name, expected in recorded.items():
        if found.get(name) != expected:
            state = "differs from what tscompress wrote" if name in found else "is gone"
            raise VerificationError(
                f"{single_line(name)} in {str(directory)!r} {state} (sha256 in {PROVENANCE_FILE}); "
                "compress again, or restore it."
            )
    checked = (CONFIG_FILE, GENERATION_FILE, PLAN_FILE, INDEX_FILE, RECIPE_FILE, PRETRAIN_FILE)
    unknown = [name for name in checked if name in records and name not in recorded]
    notes = [
        f"an older tscompress recorded no sha256 of {', '.join(unknown)}: nothing shows that it is "
        "what was written"
    ]
    return _Contents(records, weights), notes if unknown else []


def _about_local_paths(made: Made) -> list[str]:
    """Paths of this machine that recipe and provenance carry along."""
    paths = ", ".join(map(single_line, made.local_paths))
    return [f"a recipe or {PROVENANCE_FILE} names {paths}"] if paths else []


def _check_forecast(directory: Path) -> None:
    """Load it as a user will, and look at one forecast.

    Raises
    ------
    VerificationError
        The forecast is not finite.
    TscompressError
        It does not load.
    """
    forecaster = load(directory).forecaster
    with torch.random.fork_rng(devices=[]):
        forecast = forecaster.predict([torch.sin(torch.arange(48.0) / 3)], prediction_length=4)
    if not all(bool(torch.isfinite(part).all()) for part in forecast):
        raise VerificationError(f"{str(directory)!r} forecasts values that are not finite.")


def _check_is_card(text: str, directory: Path) -> None:
    """Whether the Hub will be able to read its metadata.

    Raises
    ------
    UsageError
    """
    try:
        ModelCard(text)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError, YAMLError) as error:
        # What follows is advice for who calls huggingface_hub.
        reason = one_line(error).partition(". Pass `ignore_metadata_errors")[0]
        raise UsageError(
            f"{str(directory / CARD_FILE)!r} is no model card: {reason}; mend it, or pass --force."
        ) from None


def _refuse_secrets(texts: Mapping[str, str]) -> None:
    """A token that was pasted into a recipe, a card or a message must not be published."""
    token = get_token()
    for name, text in texts.items():
        if _TOKEN.search(text) or (token and token in text):
            raise UsageError(f"{name} holds what looks like a Hub token; take it out first.")


# --------------------------------------------------------------------------------------------------
# Up
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Upload:
    """One commit to one repository, and what to say if it fails."""

    repo_id: str
    contents: _Contents
    card: str
    message: str
    branch: str | None
    create_pr: bool
    private: bool
    timeout_seconds: float

    def run(self) -> tuple[str, CommitInfo]:
        """The full id of the repository and the commit.

        Raises
        ------
        HubError
        """
        if get_token() is None:
            raise HubError(
                "there is no token to push with; run `hf auth login`, or set HF_TOKEN to a token "
                "with write access."
            )
        api = HfApi(library_name="tscompress")
        with bounded_requests(self.timeout_seconds):
            with self._answers("creating the repository"):
                repo_id = with_retries(lambda: self._create_repository(api))
            if self.branch is not None:
                branch = self.branch
                with self._answers(f"creating the branch {branch!r}"):
                    with_retries(lambda: api.create_branch(repo_id, branch=branch, exist_ok=True))
            with self._answers("the pull request" if self.create_pr else "the commit"):
                return repo_id, self._commit(api, repo_id)

    def _create_repository(self, api: HfApi) -> str:
        private = True if self.private else None
        repo_id: str = api.create_repo(self.repo_id, private=private, exist_ok=True).repo_id
        if self.private and not api.model_info(repo_id).private:
            raise HubError(
                f"{repo_id!r} exists and is public; push without --private, choose another name, "
                "or make it private on its settings page."
            )
        return repo_id

    def _commit(self, api: HfApi, repo_id: str) -> CommitInfo:
        """Upload and commit; a commit whose answer was lost is found and not made again."""
        additions: list[CommitOperationAdd] = []

        def send() -> CommitInfo:
            return api.create_commit(
                repo_id,
                additions,
                commit_message=self.message,
                revision=self.branch,
                create_pr=self.create_pr,
            )

        def upload() -> None:
            self.contents.check_state()
            # Anew for each attempt: the Hub then tells which files it has already.
            records = {CARD_FILE: self.card.encode(), **self.contents.records}
            additions[:] = [CommitOperationAdd(name, content) for name, content in records.items()]
            additions.extend(
                CommitOperationAdd(name, str(found.path))
                for name, found in self.contents.weights.items()
            )
            api.preupload_lfs_files(
                repo_id, additions, revision=self.branch, create_pr=self.create_pr
            )
            # The commit names files by the hash that was taken while they were sent.
            for addition in additions[len(records) :]:
                self.contents.check_hash(addition.path_in_repo, addition.upload_info.sha256.hex())

        return with_retries(send, before=upload, retry_on=self._may_repeat)

    def _may_repeat(self, error: BaseException) -> bool:
        # A pull request whose answer was lost may be open already; a second one helps nobody.
        if self.create_pr:
            return status_of(error) in (429, 503)
        return is_passing(error)

    @contextmanager
    def _answers(self, doing: str) -> Iterator[None]:
        """Every way in which the Hub says no, in a line of ours."""
        try:
            yield
        except network_errors() as error:
            ours = next((e for e in chain(error) if isinstance(e, TscompressError)), None)
            if ours is not None:  # raised by a bound of ours, wrapped by an upload
                raise ours from None
            reason = self._refusal(error) or self._interruption(error) or one_line(error)
            raise HubError(f"{doing} of {self.repo_id!r} failed: {reason}") from error

    def _refusal(self, error: BaseException) -> str | None:
        """Why the Hub refused; None if it did not answer."""
        status = status_of(error)
        if any(isinstance(e, GatedRepoError) for e in chain(error)):
            return "it is gated; ask for access on its Hub page, then run it again."
        if status == 401:
            return (
                "the Hub does not accept the token (HTTP status 401); run `hf auth login`, or set "
                "HF_TOKEN to a valid one."
            )
        if status == 403:
            owner = self.repo_id.rpartition("/")[0] or "your account"
            way_out = "" if self.create_pr else ", or push with --pr"
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

    def _interruption(self, error: BaseException) -> str | None:
        """What came between; None if it was no matter of the network."""
        if any(isinstance(e, OfflineModeIsEnabled) for e in chain(error)):
            return "HF_HUB_OFFLINE is set; unset it."
        if self.create_pr and (is_timeout(error) or is_cut(error)):
            return (
                "the connection was lost before the answer came; look at "
                f"{constants.ENDPOINT}/{self.repo_id}/discussions whether the pull request is "
                "there before running it again."
            )
        if is_timeout(error):
            return (
                f"the Hub said nothing for {self.timeout_seconds:g} seconds; run it again, or "
                "with a longer --timeout."
            )
        if is_cut(error):
            return "the connection was cut; what is uploaded is kept there: run it again."
        return "the Hub cannot be reached; connect and run it again." if is_network(error) else None
