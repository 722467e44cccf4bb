"""A stand-in for the Hugging Face hub: as much of its API as an upload by its own library needs."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

LARGE = ".safetensors"
"""The ending of the files that the hub wants by LFS."""


@dataclass
class Hub:
    """What the hub holds: the files of each repository, by `OWNER/NAME@BRANCH`."""

    token: str = "hf_right"
    account: str = "us"
    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def answer(  # noqa: PLR0911  a row for each address
        self, path: str, token: str, body: bytes
    ) -> tuple[int, dict[str, Any]]:
        """The status and the answer to a POST or GET."""
        self.asked.append(path)
        if token != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        value = json.loads(body) if body and not path.endswith("/main") else {}
        match path.strip("/").split("/"):
            case ["api", "whoami-v2"]:
                return 200, {"type": "user", "name": self.account}
            case ["api", "repos", "create"]:
                owner = value.get("organization") or self.account
                if owner != self.account:
                    return 403, {"error": f"You don't have the rights to create under {owner}"}
                self.private.setdefault(
                    f"{owner}/{value['name']}", value["visibility"] == "private"
                )
                return 200, {"url": f"{self.address}/{owner}/{value['name']}"}
            case ["api", "validate-yaml"]:
                return self._validated(value["content"])
            case ["api", "models", _, _, "preupload", _]:
                asked = json.loads(body)["files"]
                return 200, {"files": [self._mode(one["path"]) for one in asked]}
            case [_, _, "info", "lfs", "objects", "batch"]:
                return 200, {
                    "transfer": "basic",
                    "objects": list(map(self._blob, value["objects"])),
                }
            case ["api", "models", owner, name, "commit", branch]:
                self._commit(f"{owner}/{name}@{branch}", body)
                url = f"{self.address}/{owner}/{name}/commit/{'1' * 40}"
                return 200, {"commitUrl": url, "commitOid": "1" * 40, "success": True}
        return 404, {"error": f"there is no {path}"}

    def _mode(self, path: str) -> dict[str, Any]:
        return {
            "path": path,
            "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
            "shouldIgnore": False,
        }

    def _blob(self, one: dict[str, Any]) -> dict[str, Any]:
        upload = {"href": f"{self.address}/blobs/{one['oid']}"}
        return {"oid": one["oid"], "size": one["size"], "actions": {"upload": upload}}

    def _validated(self, content: str) -> tuple[int, dict[str, Any]]:
        """As the hub does: metadata that it cannot read, or without what it needs, is refused."""
        data = yaml.safe_load(content.split("---\n")[1])
        lacks = [
            f'"model-index[{i}].results[{j}].{name}" is required'
            for i, model in enumerate(data.get("model-index", ()))
            for j, result in enumerate(model["results"])
            for name in ("task", "dataset", "metrics")
            if "type" not in (result.get(name, [{}])[0] if name == "metrics" else result[name])
        ]
        errors = [{"message": text} for text in lacks]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def _commit(self, where: str, body: bytes) -> None:
        files = self.files.setdefault(where, {})
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A stand-in that answers at `Hub.address`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_POST(self) -> None:
            path = self.path.partition("?")[0]
            self._send(*hub.answer(path, self.headers.get("Authorization", ""), self._body()))

        do_GET = do_POST

        def do_PUT(self) -> None:
            body, oid = self._body(), self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.blobs[oid] = body
            self._send(200, {})

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
