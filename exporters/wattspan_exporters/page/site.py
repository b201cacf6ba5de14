"""The live page: static files and document.

The files are read once, when the exporter starts; a request's path is looked up among them and
never opened. They need nothing from elsewhere, and the content security policy sent with each
response lets a browser fetch nothing from elsewhere.
"""

from __future__ import annotations

import gzip
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from wattspan.http.messages import HttpResponse
from wattspan.model import Snapshot
from wattspan.ports import SnapshotView
from wattspan_exporters.page.document import build_document
from wattspan_exporters.page.history import PageHistory

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}
"""Content types by file extension; other files are not served."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Headers of every response: no external resources, no embedding, no cross-origin reads."""

STATIC_DIRECTORY = Path(__file__).with_name("static")

LIVE_JSON_PATH = "/live.json"


class _StaticFile(NamedTuple):
    kind: str
    tag: str
    body: bytes
    zipped: bytes


class LivePage:
    """The page: its static files, and the last hour for its document. Safe from any thread."""

    def __init__(self, view: SnapshotView) -> None:
        self._view = view
        self._files = _load(STATIC_DIRECTORY, "/")
        self._history = PageHistory()

    def remember(self) -> None:
        """Record the newest snapshot, if it is time; to be called about every second."""
        self._history.record(self._view())

    def document(self, snapshot: Snapshot, encoded: bytes) -> bytes:
        """The body of ``/live.json``; ``encoded`` is the JSON of ``snapshot``."""
        return build_document(snapshot, encoded, self._history)

    def file(self, path: str, zipped: bool, known: str = "") -> HttpResponse | None:
        """The static file at ``path``, None if there is none; ``known`` is If-None-Match."""
        file = self._files.get(path)
        if file is None:
            return None
        headers = {
            "Cache-Control": "no-cache",
            "Vary": "Accept-Encoding",
            "ETag": file.tag,
            **SECURITY_HEADERS,
        }
        if file.tag in known:
            return HttpResponse(304, b"", file.kind, headers)
        if zipped:
            headers["Content-Encoding"] = "gzip"
        return HttpResponse(200, file.zipped if zipped else file.body, file.kind, headers)


def _load(folder: Path, path: str) -> dict[str, _StaticFile]:
    """The files below ``folder`` with a content type, by URL path."""
    found: dict[str, _StaticFile] = {}
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        kind = CONTENT_TYPES.get(entry.name.rpartition(".")[2])
        if entry.is_dir():
            found |= _load(entry, f"{path}{entry.name}/")
        elif kind is not None:
            body = entry.read_bytes()
            tag = f'"{sha256(body).hexdigest()[:32]}"'
            name = path if entry.name == "index.html" else f"{path}{entry.name}"
            found[name] = _StaticFile(kind, tag, body, gzip.compress(body, mtime=0))
    return found
