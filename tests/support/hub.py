"""The Hugging Face hub's API as far as huggingface_hub asks for it to publish a model.

    with hub(tmp_path) as server:
        server.repos["org/base"] = Repo(files={"config.json": b"{}"})

Seen with huggingface_hub 2.4, which sends large files to a content store (Xet), here a folder that
hf_xet writes itself, or without hf_xet to the URLs of the LFS batch API.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

TOKEN, READER = "hf_" + "w" * 34, "hf_" + "r" * 34  # of one who may write, and one who may not
LARGE = ".safetensors"


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    """A repository; of a file that went to the content store it has the digest and the size."""

    files: dict[str, bytes | tuple[str, int]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    commits: list[str] = field(default_factory=list)

    def tree(self) -> dict[str, tuple[str, int]]:
        items = self.files.items()
        return {n: (git_oid(f), len(f)) if isinstance(f, bytes) else f for n, f in items}

    def info(self, name: str) -> dict[str, Any]:
        card, config = (self.files.get(n, b"{}") for n in ("README.md", "config.json"))
        assert isinstance(config, bytes) and isinstance(card, bytes)
        found = re.match(rb"---\n(.*?)\n---\n", card, re.DOTALL)
        return {
            "id": name,
            "private": self.private,
            "sha": f"{len(self.commits):040x}",
            "siblings": [{"rfilename": each} for each in self.files],
            "config": {k: v for k, v in json.loads(config).items() if k == "model_type"},
            "cardData": yaml.safe_load(found[1]) if found else None,
        }


class Hub:
    """Answers for `repos`; paths that contain `refused` it answers with 400."""

    def __init__(self, address: str, store: Path) -> None:
        self.address, self.store = address, store
        self.repos: dict[str, Repo] = {}
        self.uploads: dict[str, bytes] = {}
        self.refused: str | None = None

    def answer(self, path: str, token: str, body: bytes) -> tuple[int, Any]:
        if token not in (TOKEN, READER):
            return 401, {"error": "Invalid credentials in Authorization header"}
        if self.refused and self.refused in path:
            return 400, {"error": "the stand-in refuses"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            if token == READER:
                return 403, {"error": f"no rights under the namespace {asked['organization']}"}
            private = asked.get("visibility") == "private"
            made = Repo({".gitattributes": b"*.safetensors lfs"}, private)
            name = f"{asked['organization']}/{asked['name']}"
            self.repos[name] = made
            return 200, {"url": f"{self.address}/{name}"}
        if path.startswith("/put/"):
            self.uploads[path.removeprefix("/put/")] = body
            return 200, {}
        match = re.match(r"(/api/models)?/([^/]+/[^/.]+)(.*)", path)
        if match is None or (repo := self.repos.get(match[2])) is None:
            return 404, {"error": "Repository not found"}
        return self.of_repo(match[2], repo, match[3], token, body)

    def of_repo(self, name: str, repo: Repo, what: str, token: str, body: bytes) -> tuple[int, Any]:
        if what in ("", "/revision/main"):
            return 200, repo.info(name)
        if what.startswith("/tree/main"):
            tree = repo.tree().items()
            return 200, [{"type": "file", "path": p, "oid": o, "size": s} for p, (o, s) in tree]
        if what.startswith("/resolve/"):
            if repo.gated:
                return 403, {"error": "Access to this model is restricted"}
            return 200, repo.files[what.split("/", 3)[3]]
        if token == READER:
            return 403, {"error": f"no rights to write to {name}"}
        if what == "/preupload/main":
            there = repo.tree()
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                    "oid": there.get(each["path"], (None,))[0],
                }
                for each in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if what == "/xet-write-token/main":
            token = {"accessToken": "x", "exp": 4_102_444_800}
            return 200, token | {"casUrl": f"local://{self.store}"}
        if what == ".git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in self.uploads:
                    to = {"upload": {"href": f"{self.address}/put/{each['oid']}"}}
                    each["actions"] = to
            return 200, {"transfer": "basic", "objects": objects}
        assert what == "/commit/main", what
        head, *lines = map(json.loads, body.splitlines())
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                oid, size = value["oid"], value["size"]
                assert oid not in self.uploads or len(self.uploads[oid]) == size
                repo.files[value["path"]] = self.uploads.get(oid, (oid, size))
            else:
                del repo.files[value["path"]]
        repo.commits.append(head["value"]["summary"])
        sha = f"{len(repo.commits):040x}"
        return 200, {"commitUrl": f"{self.address}/{name}/commit/{sha}", "commitOid": sha}


@contextlib.contextmanager
def hub(store: Path) -> Iterator[Hub]:
    """Serve an empty hub on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            path = self.path.partition("?")[0]
            if path.startswith("/put/"):  # a signed URL
                token = TOKEN
            status, answer = server.answer(path, token, body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            if status == 403 and "/resolve/" in path:
                self.send_header("X-Error-Code", "GatedRepo")
            if "/resolve/" in path:
                self.send_header("ETag", hashlib.sha1(data).hexdigest())
                self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = handle_any

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Hub(f"http://127.0.0.1:{http.server_port}", store)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
