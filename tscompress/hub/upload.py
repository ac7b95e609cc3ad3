"""One commit to one repository of the Hub, with messages for its failures."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
)

from tscompress.errors import HubError
from tscompress.hub.card import CARD_FILE
from tscompress.hub.contents import Contents
from tscompress.hub.earlier_files import EarlierFiles, earlier_files
from tscompress.io.hub_errors import Push, push_errors_in_words
from tscompress.io.network import (
    bounded_requests,
    is_passing,
    status_of,
    with_retries,
)

#: Status of a commit whose parent is no longer the newest.
_MOVED_ON = 412


def check_token() -> None:
    """Refuse to go on where nothing can be pushed.

    Raises
    ------
    HubError
    """
    if get_token() is None:
        raise HubError(
            "there is no token to push with; run `hf auth login`, or set HF_TOKEN to a token "
            "with write access."
        )


def with_owner(name: str, timeout_seconds: float) -> str:
    """``owner/name`` of a repository below the token's owner.

    Raises
    ------
    HubError
    """
    push = Push(name, create_pr=False, timeout_seconds=timeout_seconds)
    with bounded_requests(timeout_seconds), push_errors_in_words("looking for the owner", push):
        return f"{with_retries(HfApi(library_name='tscompress').whoami)['name']}/{name}"


class Uploaded(NamedTuple):
    """The full id of the repository, the commit, the files that it removed, and notes."""

    repo_id: str
    commit: CommitInfo
    removed: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Upload:
    """One commit to one repository, with messages for its failures."""

    repo_id: str
    contents: Contents
    card: str
    message: str
    branch: str | None
    create_pr: bool
    private: bool
    timeout_seconds: float

    def run(self) -> Uploaded:
        """Make the commit.

        Raises
        ------
        HubError
        """
        api = HfApi(library_name="tscompress")
        with bounded_requests(self.timeout_seconds):
            with self._errors_in_words("creating the repository"):
                repo_id = with_retries(lambda: self._create_repository(api))
            if self.branch is not None:
                branch = self.branch
                with self._errors_in_words(f"creating the branch {branch!r}"):
                    with_retries(lambda: api.create_branch(repo_id, branch=branch, exist_ok=True))
            with self._errors_in_words("the pull request" if self.create_pr else "the commit"):
                return self._commit(api, repo_id)

    def _create_repository(self, api: HfApi) -> str:
        private = True if self.private else None
        repo_id: str = api.create_repo(self.repo_id, private=private, exist_ok=True).repo_id
        if self.private and not api.model_info(repo_id).private:
            raise HubError(
                f"{repo_id!r} exists and is public; push without --private, choose another name, "
                "or make it private on its settings page."
            )
        return repo_id

    def _commit(self, api: HfApi, repo_id: str) -> Uploaded:
        """Upload and commit; a commit whose answer was lost is found, not repeated."""
        additions: list[CommitOperationAdd] = []
        earlier: list[EarlierFiles] = []  # of each attempt

        def send() -> CommitInfo:
            found = earlier[-1]
            return api.create_commit(
                repo_id,
                [*additions, *(CommitOperationDelete(name, False) for name in found.stale)],
                # What someone changed since the look is not removed: look again.
                parent_commit=found.seen_at if found.stale else None,
                commit_message=self.message,
                revision=self.branch,
                create_pr=self.create_pr,
            )

        def upload() -> None:
            self.contents.check_state()
            # Again for each attempt: what a commit has removed cannot be removed once more.
            earlier.append(
                with_retries(lambda: earlier_files(api, repo_id, self.branch, self.contents))
            )
            # Again for each attempt: the Hub then reports which files it has already.
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

        def may_repeat(error: BaseException) -> bool:
            if status_of(error) == _MOVED_ON:  # nothing was removed
                earlier.pop()
            return self._may_repeat(error)

        commit = with_retries(send, before=upload, retry_on=may_repeat)
        removed = dict.fromkeys(name for one in earlier for name in one.stale)
        return Uploaded(repo_id, commit, tuple(removed), earlier[0].notes)

    def _may_repeat(self, error: BaseException) -> bool:
        # A pull request whose answer was lost may be open already: do not open a second one.
        if self.create_pr:
            return status_of(error) in (_MOVED_ON, 429, 503)
        return status_of(error) == _MOVED_ON or is_passing(error)

    def _errors_in_words(self, doing: str) -> AbstractContextManager[None]:
        push = Push(self.repo_id, self.create_pr, self.timeout_seconds)
        return push_errors_in_words(doing, push)
