"""A model Hub on localhost: the HTTP protocol that huggingface_hub speaks, and ways to fail.

Repositories live in memory. Xet is not advertised: clients run with ``HF_HUB_DISABLE_XET=1`` and
use LFS. A :class:`Fault` makes the next matching requests fail, as networks and servers do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".png", ".onnx")
LICENCES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other")
TASKS = ("time-series-forecasting", "text-generation", "image-classification")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Fault:
    """What happens to the next ``times`` requests whose "METHOD /path" matches ``pattern``.

    ``kind``: ``status`` (answer with ``status`` and ``headers``), ``cut`` (close the connection,
    in the middle of the body when something is sent), ``lose`` (do what was asked, then close),
    ``stall`` (say nothing), ``corrupt`` (flip one byte of what is sent), ``etag`` (announce a wrong
    hash).
    """

    pattern: str
    kind: str = "status"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "as asked"
    times: int = 1_000_000
    seen: int = 0


@dataclass
class Repository:
    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    #: Commit to path to content.
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    pull_requests: int = 0

    def commit(self, branch: str, files: Mapping[str, bytes | None]) -> str:
        """Add files to a branch; those without content are removed."""
        found = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        content = {name: one for name, one in found.items() if one is not None}
        sha = secrets.token_hex(20)
        self.commits[sha] = content
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[revision]]

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)


class HubServer:
    """Repositories, tokens, faults, and a log of requests ``(method, path, had a token)``."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        #: Token to the accounts it may write to; the first is its owner.
        self.tokens: dict[str, tuple[str, ...]] = {}
        self.lfs: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.multipart_bytes: int | None = None
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, bool]] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        #: Called with "METHOD /path" twice: before a request is handled, and before it is answered.
        self.on_step: Callable[[str], None] = lambda request: None
        hub = self

        class Bound(_Handler):
            pass

        Bound.hub = hub
        self._server = _Server(("127.0.0.1", 0), Bound)
        self._server.daemon_threads = True
        self._server.block_on_close = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def create(self, repo_id: str, *, private: bool = False, gated: bool = False) -> Repository:
        repository = Repository(private, gated)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.repositories[repo_id] = repository
        return repository

    def upload(self, repo_id: str, directory: Path, **options: bool) -> Repository:
        """A repository with the files of a directory, as if they had been pushed."""
        repository = self.create(repo_id, **options)
        repository.commit("main", {p.name: p.read_bytes() for p in directory.iterdir()})
        return repository

    @contextmanager
    def failing(self, pattern: str, kind: str = "status", **options: Any) -> Iterator[Fault]:
        fault = Fault(pattern, kind, **options)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def requests(self, pattern: str) -> int:
        return sum(
            re.search(pattern, f"{method} {path}") is not None for method, path, _ in self.log
        )


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients that gave up are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Or a body waits 40 ms for the receipt of its header.
    disable_nagle_algorithm = True
    hub: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    # ---------------------------------------------------------------------------------- the frame

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.route, self.query = parts.path, parse_qs(parts.query)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.accounts = self.hub.tokens.get(given)
        fault = self.fault = self._fault()
        with self.hub.lock:
            self.hub.log.append((self.command, self.route, bool(given)))
        self.hub.on_step(f"{self.command} {self.route}")
        if fault is not None and fault.kind in ("cut", "stall") and self.command != "GET":
            return self._vanish(stall=fault.kind == "stall")
        if fault is not None and fault.kind == "stall":
            return self._vanish(stall=True)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._read_chunks()
        if fault is not None and fault.kind == "status":
            return self._json({"error": fault.message}, fault.status, fault.headers)
        if given and self.accounts is None:
            message = "Invalid credentials in Authorization header"
            return self._json({"error": message}, 401, {"X-Error-Message": message})
        with self.hub.lock:
            answer = self._answer()
        self.hub.on_step(f"{self.command} {self.route}")
        answer()
        return None

    def _fault(self) -> Fault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.seen < fault.times and re.search(
                    fault.pattern, f"{self.command} {self.route}"
                ):
                    fault.seen += 1
                    return fault
        return None

    def _vanish(self, *, stall: bool = False) -> None:
        if stall:
            self.hub.closing.wait(60)
        self.close_connection = True
        with suppress(OSError):  # the other side may have gone first
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(content).encode(), status, headers or {})

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        kind = "" if self.fault is None else self.fault.kind
        if kind == "lose":
            return self._vanish()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if kind == "corrupt":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]
        self.wfile.write(body[: len(body) // 2] if kind == "cut" else body)
        return self._vanish() if kind == "cut" else None

    def _no(self, status: int, code: str) -> Any:
        return lambda: self._json({"error": code}, status, {"X-Error-Code": code})

    # --------------------------------------------------------------------------------- the routes

    def _answer(self) -> Any:
        """What sends the answer; decided under the lock, sent without it."""
        routes = (
            (r"GET /api/whoami-v2", self._whoami),
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", self._validate_yaml),
            (r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            (r"POST /api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            (r"POST /api/models/([^/]+/[^/]+)/branch/(.+)", self._branch),
            (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            (r"PUT /lfs/(\w+)(?:/(\d+))?", self._put),
            (r"POST /lfs/(\w+)/(complete|verify)", self._finish),
            (r"GET /api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            (r"GET /api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._info),
            (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        )
        for pattern, handle in routes:
            if found := re.fullmatch(pattern, f"{self.command} {self.route}"):
                groups = [None if g is None else unquote(g) for g in found.groups()]
                return handle(*groups)
        return self._no(404, "NoSuchRoute")

    def _refused(self, repo_id: str, *, write: bool = False) -> Any:
        """None, or what sends the refusal."""
        repository = self.hub.repositories.get(repo_id)
        owner = repo_id.split("/")[0]
        ours = self.accounts is not None and owner in self.accounts
        if repository is None or (repository.private and not ours):
            return self._no(404 if self.accounts else 401, "RepoNotFound")
        if write and not ours:
            return self._no(403 if self.accounts else 401, "Forbidden")
        return None

    def _whoami(self) -> Any:
        if self.accounts is None:
            return self._no(401, "Unauthorized")
        return lambda: self._json({"type": "user", "name": self.accounts[0]})

    def _create(self) -> Any:
        asked = json.loads(self.body)
        if self.accounts is None:
            return self._no(401, "Unauthorized")
        owner = asked.get("organization") or self.accounts[0]
        repo_id = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if owner not in self.accounts:
            return self._no(403, "Forbidden")
        if repo_id in self.hub.repositories:
            return lambda: self._json(answer | {"error": "exists already"}, 409)
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.hub.create(repo_id, private=private)
        return lambda: self._json(answer)

    def _validate_yaml(self) -> Any:
        errors, warnings = card_problems(json.loads(self.body)["content"])
        content = {name: [{"message": m} for m in found]
                   for name, found in (("errors", errors), ("warnings", warnings))}  # fmt: skip
        return lambda: self._json(content, 400 if errors else 200)

    def _preupload(self, repo_id: str, revision: str) -> Any:
        opens_pr = "create_pr" in self.query
        if refusal := self._refused(repo_id, write=not opens_pr):
            return refusal
        repository = self.hub.repositories[repo_id]
        if (sha := repository.find(revision)) is None:
            return self._no(404, "RevisionNotFound")
        present = repository.commits[sha]
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": content_id(file["path"], present[file["path"]])
                if file["path"] in present
                else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        return lambda: self._json({"files": files})

    def _batch(self, repo_id: str) -> Any:
        if refusal := self._refused(repo_id):
            return refusal
        objects = []
        for one in json.loads(self.body)["objects"]:
            answer = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.lfs:
                url = f"{self.hub.url}/lfs/{one['oid']}"
                upload: dict[str, Any] = {"href": url}
                chunk = self.hub.multipart_bytes
                if chunk is not None:
                    count = -(-one["size"] // chunk)
                    parts = {str(i + 1): f"{url}/{i + 1}" for i in range(count)}
                    upload = {"href": f"{url}/complete",
                              "header": {"chunk_size": str(chunk), **parts}}  # fmt: skip
                answer["actions"] = {"upload": upload, "verify": {"href": f"{url}/verify"}}
            objects.append(answer)
        transfer = "basic" if self.hub.multipart_bytes is None else "multipart"
        return lambda: self._json({"transfer": transfer, "objects": objects})

    def _put(self, oid: str, part: str | None) -> Any:
        if part is not None:
            self.hub.parts.setdefault(oid, {})[int(part)] = self.body
        elif hashlib.sha256(self.body).hexdigest() == oid:
            self.hub.lfs[oid] = self.body
        else:
            return self._no(400, "BadDigest")
        etag = hashlib.md5(self.body).hexdigest()
        return lambda: self._send(b"", 200, {"ETag": f'"{etag}"'})

    def _finish(self, oid: str, what: str) -> Any:
        if what == "complete":
            parts = self.hub.parts.pop(oid)
            body = b"".join(parts[number] for number in sorted(parts))
            if hashlib.sha256(body).hexdigest() == oid:
                self.hub.lfs[oid] = body
        if oid not in self.hub.lfs:
            return self._no(404, "NoSuchObject")
        return lambda: self._json({})

    def _commit(self, repo_id: str, revision: str) -> Any:
        opens_pr = "create_pr" in self.query
        if refusal := self._refused(repo_id, write=not opens_pr):
            return refusal
        repository = self.hub.repositories[repo_id]
        if revision not in repository.branches:
            return self._no(404, "RevisionNotFound")
        files: dict[str, bytes | None] = {}
        head = repository.commits[repository.branches[revision]]
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if value.get("parentCommit") not in (None, repository.branches[revision]):
                return self._no(412, "PreconditionFailed")
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.lfs:
                    return self._no(400, "MissingObject")
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif item["key"] == "deletedFile":
                if value["path"] not in head:
                    return self._no(400, "NoSuchFile")
                files[value["path"]] = None
        answer: dict[str, Any] = {}
        if opens_pr:
            repository.pull_requests += 1
            branch = f"refs/pr/{repository.pull_requests}"
            repository.branches[branch] = repository.branches["main"]
            answer["pullRequestUrl"] = (
                f"{self.hub.url}/{repo_id}/discussions/{repository.pull_requests}"
            )
            revision = branch
        sha = repository.commit(revision, files)
        answer |= {"commitOid": sha, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}"}
        return lambda: self._json(answer)

    def _branch(self, repo_id: str, branch: str) -> Any:
        if refusal := self._refused(repo_id, write=True):
            return refusal
        repository = self.hub.repositories[repo_id]
        if not takes_branch(branch):
            return self._no(400, "InvalidBranch")
        if branch in repository.branches:
            return self._no(409, "BranchExists")
        repository.branches[branch] = repository.branches["main"]
        return lambda: self._json({})

    def _info(self, repo_id: str, revision: str | None) -> Any:
        if refusal := self._refused(repo_id):
            return refusal
        repository = self.hub.repositories[repo_id]
        if (sha := repository.find(revision or "main")) is None:
            return self._no(404, "RevisionNotFound")
        content = {
            "id": repo_id,
            "sha": sha,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "tags": [],
            "siblings": [
                {"rfilename": path} | (_blob(path, file) if "blobs" in self.query else {})
                for path, file in repository.commits[sha].items()
            ],
        }
        return lambda: self._json(content)

    def _tree(self, repo_id: str, revision: str) -> Any:
        if refusal := self._refused(repo_id):
            return refusal
        repository = self.hub.repositories[repo_id]
        if (sha := repository.find(revision)) is None:
            return self._no(404, "RevisionNotFound")
        entries = []
        for path, content in repository.commits[sha].items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content),
                                     "oid": git_id(content)}  # fmt: skip
            if path.endswith(LFS_SUFFIXES):
                oid = content_id(path, content)
                entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
            entries.append(entry)
        return lambda: self._json(entries)

    def _resolve(self, repo_id: str, revision: str, path: str) -> Any:
        if refusal := self._refused(repo_id):
            return refusal
        repository = self.hub.repositories[repo_id]
        ours = self.accounts is not None and repo_id.split("/")[0] in self.accounts
        if repository.gated and not ours:
            return self._no(403 if self.accounts else 401, "GatedRepo")
        if (sha := repository.find(revision)) is None:
            return self._no(404, "RevisionNotFound")
        content = repository.commits[sha].get(path)
        if content is None:
            return self._no(404, "EntryNotFound")
        etag = content_id(path, content)
        if self.fault is not None and self.fault.kind == "etag":
            etag = hashlib.sha256(b"something else").hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if path.endswith(LFS_SUFFIXES):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(found[1]), int(found[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        return lambda: self._send(content, status, headers)


def _blob(path: str, content: bytes) -> dict[str, Any]:
    """What the Hub says of a file among the metadata of a repository."""
    found: dict[str, Any] = {"size": len(content), "blobId": git_id(content)}
    if path.endswith(LFS_SUFFIXES):
        sha256 = content_id(path, content)
        found["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
    return found


def takes_branch(name: str) -> bool:
    """Whether the Hub creates such a branch: git's rules, and none below refs/."""
    forbidden = set(" ~^:?*[\\\x7f") | set(map(chr, range(32)))
    if forbidden & set(name) or ".." in name or "@{" in name or name == "HEAD":
        return False
    if name.startswith(("refs/", "-")) or name.endswith(".") or len(name) > 250:
        return False
    return all(part and part[0] != "." and not part.endswith(".lock") for part in name.split("/"))


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def content_id(path: str, content: bytes) -> str:
    """SHA-256 of LFS files, git's id of others."""
    lfs = path.endswith(LFS_SUFFIXES)
    return hashlib.sha256(content).hexdigest() if lfs else git_id(content)


def card_problems(content: str) -> tuple[list[str], list[str]]:
    """Errors and warnings about the metadata of a model card, in the spirit of the Hub's."""
    found = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
    if found is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"], []
    if not isinstance(data, dict):
        return ["the metadata is not a mapping"], []
    errors = []
    if "license" in data and data["license"] not in LICENCES:
        errors.append(f'"license" must be one of {LICENCES}')
    if "pipeline_tag" in data and data["pipeline_tag"] not in TASKS:
        errors.append(f'"pipeline_tag" must be one of {TASKS}')
    bases = data.get("base_model", [])
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str) or not REPO_ID.fullmatch(base):
            errors.append(f'"base_model" {base!r} is no repository id')
    if not all(isinstance(tag, str) for tag in data.get("tags", [])):
        errors.append('"tags" must be strings')
    for model in data.get("model-index", []):
        if not model.get("name"):
            errors.append('"model-index[0].name" is required')
        for result in model.get("results") or [{}]:
            whole = result.get("task", {}).get("type") and result.get("metrics")
            dataset = result.get("dataset", {})
            if not whole or not dataset.get("type") or not dataset.get("name"):
                errors.append('"model-index[0].results" lacks task, dataset or metrics')
            for metric in result.get("metrics", []):
                if not metric.get("type") or not isinstance(metric.get("value"), int | float):
                    errors.append('"model-index[0].results.metrics" lacks type or value')
    return errors, []
