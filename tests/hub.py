"""A hub on the loopback device, and folders laid out like its cache. Knows nothing of spmdflow."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_token_that_may_write"
PATIENT = {"HF_HUB_ETAG_TIMEOUT": "600", "HF_HUB_DOWNLOAD_TIMEOUT": "600"}
"""Variables of programs whose requests are counted: after 10 s they would ask once more."""


def write_cached(cache: Path, repo: str, files: Mapping[str, bytes], commit: str = COMMIT) -> Path:
    """Lay a repository out as the hub's cache does: refs, blobs, snapshots; the snapshot.

    repo: models/owner/name or datasets/owner/name. Its branch main is the commit.
    """
    folder = cache / repo.replace("/", "--")
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
    reference = folder / "refs" / "main"
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class Hub(ThreadingHTTPServer):
    """Answers what `snapshot_download`, `create_repo` and `upload_folder` ask; counts it.

    An upload goes as to the real one: weights as objects by their hash, the rest in the commit.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        """repositories: models/owner/name or datasets/owner/name -> its files."""
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories = {name: dict(files) for name, files in repositories.items()}
        self.commits: list[str] = []
        """Their messages."""
        self.objects: dict[str, bytes] = {}
        """Uploaded weights by their hash."""
        self.asked: Counter[str] = Counter()
        """ "GET models/owner/name/file" -> how often."""

    @property
    def endpoint(self) -> str:
        """For HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub with these repositories, as long as the block lasts."""
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Answer(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:  # noqa: N802
        self._answer()

    def do_GET(self) -> None:  # noqa: N802
        self._answer()

    def do_POST(self) -> None:  # noqa: N802
        body = self._body()
        words = self.path.split("?")[0].strip("/").split("/")
        self.server.asked[f"POST {words[-1] if words[-2] == 'repos' else words[-2]}"] += 1
        if words[:3] == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif words[-2] == "preupload":
            modes = [
                (f["path"], "regular lfs".split()[f["path"].endswith(".safetensors")])
                for f in json.loads(body)["files"]
            ]
            files = [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes]
            self._send_json({"files": files})
        elif words[-2] == "objects":
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.server.endpoint}/put/{each['oid']}"}}
            self._send_json({"transfer": "basic", "objects": objects})
        elif words[-2] == "commit":
            self._commit("/".join(words[1:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self._send(404, b"")

    def do_PUT(self) -> None:  # noqa: N802
        body = self._body()
        digest = self.path.rpartition("/")[2]
        if _digest(body) == digest:
            self.server.objects[digest] = body
        self._send(200 if digest in self.server.objects else 400, b"")

    def _body(self) -> bytes:
        """Of known length, or in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _create(self, asked: Mapping[str, str]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        may_write = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not may_write or asked["organization"] == "no":
            self._send(403, b"", {"X-Error-Message": "You have no rights there."})
            return
        is_known = f"models/{repo}" in self.server.repositories
        self.server.repositories.setdefault(f"models/{repo}", {})
        body = json.dumps({"url": f"{self.server.endpoint}/{repo}"}).encode()
        self._send(409 if is_known else 200, body, {"Content-Type": "application/json"})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.repositories[repo]
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "header":
                self.server.commits.append(value["summary"])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert key == "lfsFile", key
                files[value["path"]] = self.server.objects[value["oid"]]
        address = f"{self.server.endpoint}/{repo.partition('/')[2]}/commit/{COMMIT}"
        self._send_json({"success": True, "commitUrl": address, "commitOid": COMMIT})

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def _answer(self) -> None:
        words = self.path.split("?")[0].strip("/").split("/")
        if words[0] == "api":
            self._about("/".join(words[1:4]), words[4] if len(words) > 4 else "info")
        elif "resolve" in words:
            place = words.index("resolve")
            owner = words[:place] if words[0] == "datasets" else ["models", *words[:place]]
            self._file("/".join(owner), "/".join(words[place + 2 :]))
        else:
            self._send(404, b"")

    def _about(self, repo: str, what: str) -> None:
        files = self.server.repositories.get(repo)
        self.server.asked[f"{what} {repo}"] += 1
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif what == "tree":
            self._send_json([_entry(name, content) for name, content in files.items()])
        else:
            siblings = [{"rfilename": name} for name in files]
            self._send_json({"id": repo.partition("/")[2], "sha": COMMIT, "siblings": siblings})

    def _file(self, repo: str, name: str) -> None:
        content = self.server.repositories.get(repo, {}).get(name)
        self.server.asked[f"{self.command} {repo}/{name}"] += 1
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
