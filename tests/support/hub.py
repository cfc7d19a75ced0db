"""A stand-in of the Hugging Face hub on this machine: the datasets of a folder, to read.

`HF_ENDPOINT` leads huggingface_hub and datasets to it, before they are imported.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0" * 40
"""Each repository has one commit."""


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Serve `folder/OWNER/NAME/*` as the dataset OWNER/NAME. Yields the address."""

    class Handler(_Handler):
        root = folder

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+(?:/(.*))?)?", path):
            name, what, below = found.groups()
            if (self.root / name).is_dir():
                return self._api(name, what == "tree", below)
        elif found := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            file = self.root / found[1] / found[2]
            if file.is_file():
                return self._file(file.read_bytes())
        self._send(404, b"", {"X-Error-Code": "EntryNotFound" if found else "RepoNotFound"})

    do_HEAD = do_GET

    def _api(self, name: str, tree: bool, below: str | None) -> None:
        place = self.root / name
        files = {path.relative_to(place).as_posix(): path for path in place.rglob("*") if path.is_file()}
        if not tree:
            return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
        start = f"{below}/" if below else ""
        self._json([_described(file, path) for file, path in files.items() if file.startswith(start)])

    def _file(self, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if given is None:
            return self._send(200, content, headers)
        first, last = int(given[1]), min(int(given[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self._send(206, content[first : last + 1], headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _described(name: str, path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
