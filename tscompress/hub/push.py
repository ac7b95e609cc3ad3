"""Pushing a compressed checkpoint to the Hub: verified, with a card, in one commit.

Only files of tscompress are uploaded, after their hashes are checked, the checkpoint loads and its
forecast is finite. The token is that of huggingface_hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tscompress.errors import (
    UsageError,
)
from tscompress.hub.card import (
    CARD_FILE,
    BenchOrFile,
    ScoresOrFile,
    card_by_hand,
    card_of,
    licence_of,
    measured_of,
)
from tscompress.hub.card_scores import about_measurements
from tscompress.hub.contents import (
    about_local_paths,
    check_forecast,
    check_is_card,
    read_records,
    refuse_secrets,
    verified,
)
from tscompress.hub.earlier_files import WOULD_REMOVE
from tscompress.hub.onnx_files import onnx_files
from tscompress.hub.origin import CheckpointRecord, read_checkpoint_record
from tscompress.hub.upload import Upload, check_token, with_owner
from tscompress.io.arguments import check_type
from tscompress.io.files import user_path, write_text_atomically
from tscompress.io.network import (
    is_branch_name,
    is_repo_id,
    one_line,
)
from tscompress.io.untrusted import single_line

DEFAULT_TIMEOUT_SECONDS = 60.0
_LONGEST_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True)
class PushResult:
    """Files, card and commit of a push; with ``dry_run`` of the push that would follow.

    Attributes
    ----------
    files
        Name and size in bytes of each uploaded file.
    left_behind
        Other files in the directory, which are not uploaded.
    removed
        Files that the commit removed from the repository: those that tscompress wrote there of an
        earlier checkpoint, or in ``onnx/`` of other weights. Unknown before a push.
    notes
        Notes for the user, one sentence each.
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
    removed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        done = self.pull_request or self.url or "dry run"
        size = sum(self.files.values()) / 1e6
        return f"PushResult({self.repo_id!r}, {len(self.files)} files, {size:.1f} MB, {done})"

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
    scores: ScoresOrFile = None,
    bench: BenchOrFile = None,
    onnx: str | Path | None = None,
    force: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> PushResult:
    """Verify a compressed checkpoint, write its card, and push both in one commit.

    Before the upload, the hashes in ``provenance.json`` are compared, and the checkpoint is loaded
    and makes a forecast. Files that change after the comparison are not committed. A missing
    repository is created.

    Parameters
    ----------
    directory
        Output of ``compress`` or ``recover``, or the checkpoint below that of ``run`` or
        ``pretrain``. A model in memory is refused: save it first.
    repo_id
        ``owner/name``, or a name below the token's owner.
    private
        Create the repository as a private one; refused if it exists and is public.
    branch
        Commit to this branch; a missing one is created.
    create_pr
        Open a pull request instead; the repository may be someone else's.
    dry_run
        Only report what a push would upload: no network, no file written.
    message
        Of the commit.
    scores, bench
        For the card, or files of ``evaluate`` and ``bench --json``; by default those that
        ``tscompress run`` wrote above the directory.
    onnx
        A directory that :func:`tscompress.export` made of this checkpoint, to go up as ``onnx/``.
        What an earlier push left there goes in the same commit, if tscompress wrote it, it is as it
        was, and it is of other weights.
    force
        Also replace a card that was written by hand.
    timeout_seconds
        How long the Hub may stay silent; a day at most.

    Raises
    ------
    UsageError
        No such directory, not written by tscompress, not a repository id, measurements or ``onnx``
        of another model, a token in a file or message to publish, or contradictory options.
    CorruptCheckpointError, VerificationError
        The checkpoint does not load, its forecast is not finite, a file differs from its record, or
        a file changed during the push.
    HubError
        The Hub refused, or could not be reached.
    """
    check_type("directory", directory, (str, Path), "the directory that tscompress.save wrote")
    check_type("repo_id", repo_id, (str,), "owner/name")
    check_type("onnx", onnx, (str, Path, type(None)), "the directory of an exported model")
    directory = user_path(directory)
    message = message or f"Push {directory.resolve().name}, made by tscompress"
    refuse_secrets({"the commit message": message, "the branch": branch or "", "the id": repo_id})
    _check_request(repo_id, branch, create_pr, timeout_seconds)
    records = read_records(directory)
    checkpoint = read_checkpoint_record(directory)
    refuse_secrets(_texts(records))
    contents, notes = verified(checkpoint, records)
    exported = None if onnx is None else onnx_files(onnx, contents)
    if exported is not None:
        contents = contents.beside(exported.contents)
        refuse_secrets(_texts(exported.contents.records))
        notes += exported.notes
    notes += about_local_paths(checkpoint)
    check_forecast(directory)
    licence = licence_of(checkpoint, fetch=not dry_run)
    if not licence:
        notes.append(_without_licence(checkpoint))
    card = card_by_hand(directory / CARD_FILE, force=force)
    by_hand = card is not None
    if card is None:
        repo_id, unowned = _whole_id(repo_id, timeout_seconds, dry_run=dry_run)
        notes += unowned
        scores, bench = measured_of(checkpoint, scores, bench)
        card = str(
            card_of(
                checkpoint,
                repo_id,
                scores=scores,
                bench=bench,
                licence=licence,
                inherited=True,
                revision=branch,
                onnx=None if exported is None else exported.facts,
            )
        )
        notes += about_measurements(checkpoint, repo_id, scores, bench)
    else:
        check_is_card(card, directory)
        notes.append(
            f"{CARD_FILE} was written by hand and is uploaded unchanged; --force replaces it"
        )
    refuse_secrets({CARD_FILE: card})
    sizes = {CARD_FILE: len(card.encode())} | contents.sizes
    inside = {name.partition("/")[0] for name in sizes}
    left = tuple(sorted(p.name for p in directory.iterdir() if p.name not in inside))
    if dry_run:
        return PushResult(repo_id, sizes, left, (*notes, WOULD_REMOVE), card)
    check_token()
    contents.check_state()
    if not by_hand:
        write_text_atomically(directory / CARD_FILE, card)
    upload = Upload(repo_id, contents, card, message, branch, create_pr, private, timeout_seconds)
    done = upload.run()
    commit, said = done.commit, (*notes, *done.notes)
    made = commit.oid, commit.commit_url, commit.pr_url
    return PushResult(done.repo_id, sizes, left, said, card, *made, done.removed)


def _whole_id(repo_id: str, timeout_seconds: float, *, dry_run: bool) -> tuple[str, list[str]]:
    """The id that the card names, with the token's owner; a dry run has a note in its place."""
    if "/" in repo_id:
        return repo_id, []
    if dry_run:
        return repo_id, [f"the card names {repo_id!r} alone; a push adds the owner of the token"]
    check_token()
    return with_owner(repo_id, timeout_seconds), []


def _without_licence(checkpoint: CheckpointRecord) -> str:
    """A note on the card."""
    above = checkpoint.base or checkpoint.start
    if above is None:
        return (
            f"the licence of a model trained from scratch is yours to choose; add it to {CARD_FILE}"
        )
    return f"the licence of {above.source!r} is unknown; the card has none"


def _texts(records: Mapping[str, bytes]) -> dict[str, str]:
    return {name: content.decode(errors="replace") for name, content in records.items()}


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
