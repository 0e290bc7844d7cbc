"""A Hub-compatible model server on loopback, so that tests can push and download without a network.

It speaks the part of the Hub's HTTP API that huggingface_hub uses for model repositories without Xet:
set HF_HUB_DISABLE_XET=1. A commit is kept as a whole tree; file contents lie in a folder under their sha256.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NO_COMMIT = "0" * 40
TOKEN = "hf_a-secret-of-the-tests"


@dataclass(frozen=True)
class StoredFile:
    sha256: str
    size: int
    etag: str  # sha256 of a large file, git's own hash of a regular one
    is_lfs: bool


@dataclass(frozen=True)
class Commit:
    sha: str
    message: str
    files: dict[str, StoredFile]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Commit] = field(default_factory=lambda: {NO_COMMIT: Commit(NO_COMMIT, "initial", {})})
    branches: dict[str, str] = field(default_factory=lambda: {"main": NO_COMMIT})

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch or a sha names."""
        return self.commits.get(self.branches.get(revision, revision))


class LocalHub:
    """The server and what it holds; `with LocalHub(folder) as hub` serves it at `hub.url`."""

    def __init__(self, folder: Path, token: str = "x") -> None:
        self.folder, self.token = folder, token
        self.folder.mkdir(parents=True, exist_ok=True)
        self.repos: dict[str, Repo] = {}
        self.calls: list[str] = []  # "METHOD path -> status", in order of arrival
        self.failures: list[tuple[str, int, str]] = []  # (part of a path, status, message), each used once
        self.cuts: list[str] = []  # parts of a path whose next upload is cut off in the middle
        self.wait_headers: dict[str, str] = {}  # sent with every refusal
        self.role, self.writers = "write", True  # of the token; and whether it may write to what exists
        self.part_bytes: int | None = None  # larger files are uploaded in parts of this size
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "LocalHub":
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail_next(self, path_part: str, status: int, message: str = "told to fail", times: int = 1) -> None:
        """Answer the next `times` calls whose path contains `path_part` with `status`."""
        self.failures += [(path_part, status, message)] * times

    def commits(self, repo_id: str) -> list[Commit]:
        """The commits pushed to a repository, oldest first, without the empty one it begins with."""
        return list(self.repos[repo_id].commits.values())[1:]

    def content(self, repo_id: str, path: str, revision: str = "main") -> bytes:
        """What a file of a repository holds."""
        commit = self.repos[repo_id].at(revision)
        assert commit is not None
        return self.blob(commit.files[path].sha256).read_bytes()

    def blob(self, sha256: str) -> Path:
        return self.folder / sha256

    def store(self, content: bytes, is_lfs: bool) -> StoredFile:
        """Keep `content` and say under which hashes."""
        sha256 = hashlib.sha256(content).hexdigest()
        self.blob(sha256).write_bytes(content)
        git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return StoredFile(sha256, len(content), sha256 if is_lfs else git_hash, is_lfs)

    def take_failure(self, path: str) -> tuple[str, int, str] | None:
        with self.lock:
            due = next((failure for failure in self.failures if failure[0] in path), None)
            if due:
                self.failures.remove(due)
            return due


class Handler(BaseHTTPRequestHandler):
    """One request. The routes at the end of the file name the method that answers it."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        path = urlsplit(self.path).path
        if cut := next((part for part in self.hub.cuts if part in path and self.command == "PUT"), None):
            self.hub.cuts.remove(cut)
            self.hub.calls.append(f"{self.command} {self.path} -> cut")
            self.rfile.read(min(100, int(self.headers.get("Content-Length") or 0)))
            self.close_connection = True
            self.connection.close()
            return None
        self.body = self.read_body()
        if failure := self.hub.take_failure(path):
            return self.refuse(*failure[1:])
        if self.needs_token(path) and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self.refuse(401, "Invalid credentials in Authorization header")
        for method, pattern, answer in ROUTES:
            if method == self.command and (found := re.fullmatch(pattern, path)):
                with self.hub.lock:
                    return answer(self, **{name: unquote(text or "") for name, text in found.groupdict().items()})
        return self.refuse(404, f"no such page here: {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815 (the standard library's names)

    def needs_token(self, path: str) -> bool:
        is_storage = path.startswith("/storage/")  # large files go to signed addresses, without the token
        reads = self.command in ("GET", "HEAD") and path != "/api/whoami-v2" and "auth-check" not in path
        private = any(repo.private and name in path for name, repo in self.hub.repos.items())
        return not is_storage and (private or not reads)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.hub.calls.append(f"{self.command} {self.path} -> {status}")
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        named = {"X-Error-Code": code, "X-Error-Message": message}
        self.reply({"error": message}, status, named | self.hub.wait_headers)

    def find(self, repo: str, revision: str) -> Commit | None:
        """The commit that is meant, or None after the refusal has been sent."""
        stored = self.hub.repos.get(repo)
        commit = stored.at(revision or "main") if stored else None
        if stored is None:
            self.refuse(404, "Repository not found", "RepoNotFound")
        elif commit is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def whoami(self) -> None:
        self.reply({"type": "user", "name": "tester", "orgs": [], "auth": {"accessToken": {"role": self.hub.role}}})

    def auth_check(self, repo: str) -> None:
        if repo not in self.hub.repos:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        return self.reply({}) if self.hub.writers else self.refuse(403, "you may not write here")

    def create_repo(self) -> None:
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
        address = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.repos:
            return self.reply({"error": "You already created this model repo", **address}, 409)
        self.hub.repos[repo] = Repo(private=wanted.get("visibility") == "private")
        return self.reply(address)

    def create_branch(self, repo: str, branch: str) -> None:
        stored = self.hub.repos[repo]
        if branch in stored.branches:
            return self.refuse(409, f"Reference already exists: {branch}")
        stored.branches[branch] = stored.branches["main"]
        return self.reply({})

    def validate_yaml(self) -> None:
        has_metadata = json.loads(self.body)["content"].startswith("---\n")
        errors = [] if has_metadata else [{"message": "no metadata"}]
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo: str, revision: str) -> None:
        commit = self.find(repo, revision)
        if commit is None:
            return
        answers = []
        for wanted in json.loads(self.body)["files"]:
            mode = "lfs" if wanted["path"].endswith(".safetensors") else "regular"
            known = commit.files.get(wanted["path"])
            answer = {"path": wanted["path"], "uploadMode": mode, "shouldIgnore": False}
            answers.append(answer | ({"oid": known.etag} if known else {}))
        self.reply({"files": answers})

    def lfs_batch(self, repo: str) -> None:
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            address, size = f"{self.hub.url}/storage/{wanted['oid']}", self.hub.part_bytes
            upload: dict[str, Any] = {"upload": {"href": address}}
            if size and wanted["size"] > size:
                parts = {str(n + 1): f"{address}/{n + 1}" for n in range(-(-wanted["size"] // size))}
                upload = {"upload": {"href": address, "header": {"chunk_size": str(size), **parts}}}
            verify = {"verify": {"href": f"{self.hub.url}/storage/verify"}}
            is_here = self.hub.blob(wanted["oid"]).exists()
            objects.append(wanted | ({} if is_here else {"actions": upload | verify}))
        self.reply({"transfer": "multipart" if self.hub.part_bytes else "basic", "objects": objects})

    def lfs_put(self, sha256: str) -> None:
        stored = self.hub.store(self.body, is_lfs=True)
        self.reply({}, 200 if stored.sha256 == sha256 else 400)

    def lfs_part(self, sha256: str, number: str) -> None:
        self.hub.parts.setdefault(sha256, {})[int(number)] = self.body
        self.reply({}, headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def lfs_complete(self, sha256: str) -> None:
        held = self.hub.parts.pop(sha256)
        named = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        stored = self.hub.store(b"".join(held[number] for number in named), is_lfs=True)
        self.reply({}, 200 if stored.sha256 == sha256 else 400)

    def lfs_verify(self) -> None:
        wanted = json.loads(self.body)
        blob = self.hub.blob(wanted["oid"])
        self.reply({}, 200 if blob.exists() and blob.stat().st_size == wanted["size"] else 404)

    def commit(self, repo: str, revision: str) -> None:
        parent = self.find(repo, revision)
        if parent is None:
            return
        files, message = dict(parent.files), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = self.hub.store(base64.b64decode(value["content"]), is_lfs=False)
            elif item["key"] == "lfsFile":
                files[value["path"]] = StoredFile(value["oid"], value["size"], value["oid"], is_lfs=True)
        stored = self.hub.repos[repo]
        sha = hashlib.sha1(f"{parent.sha}{len(stored.commits)}{files}".encode()).hexdigest()
        stored.commits[sha] = Commit(sha, message, files)
        stored.branches[revision] = sha
        self.reply({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def model_info(self, repo: str, revision: str) -> None:
        if commit := self.find(repo, revision):
            siblings = [{"rfilename": name} for name in commit.files]
            private = self.hub.repos[repo].private
            self.reply({"id": repo, "sha": commit.sha, "private": private, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str) -> None:
        if commit := self.find(repo, revision):
            self.reply([tree_entry(name, stored) for name, stored in commit.files.items()])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        commit = self.find(repo, revision)
        if commit is None:
            return None
        if name not in commit.files:
            return self.refuse(404, "Entry not found", "EntryNotFound")
        stored = commit.files[name]
        content, status = self.hub.blob(stored.sha256).read_bytes(), 200
        headers = {"ETag": f'"{stored.etag}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if stored.is_lfs:
            headers |= {"X-Linked-Etag": f'"{stored.etag}"', "X-Linked-Size": str(stored.size)}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), int(asked[2] or stored.size - 1)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{stored.size}"
        return self.reply(content, status, headers)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: `hub.calls` is the log."""


def tree_entry(name: str, stored: StoredFile) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": stored.size, "oid": stored.etag}
    return entry | ({"lfs": {"oid": stored.sha256, "size": stored.size, "pointerSize": 134}} if stored.is_lfs else {})


REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create_repo),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>[^/]+)", Handler.create_branch),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", "/storage/(?P<sha256>[0-9a-f]{64})", Handler.lfs_put),
    ("PUT", r"/storage/(?P<sha256>[0-9a-f]{64})/(?P<number>\d+)", Handler.lfs_part),
    ("POST", "/storage/(?P<sha256>[0-9a-f]{64})", Handler.lfs_complete),
    ("GET", f"/api/models/{REPO}/auth-check/write", Handler.auth_check),
    ("POST", "/storage/verify", Handler.lfs_verify),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", Handler.commit),
    ("GET", f"/api/models/{REPO}(?:/revision/{REVISION})?", Handler.model_info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}", Handler.tree),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<name>.+)", Handler.resolve),
    ("HEAD", f"/{REPO}/resolve/{REVISION}/(?P<name>.+)", Handler.resolve),
]
