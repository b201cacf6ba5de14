"""The live page's responses: its static files, and its figures.

The files are read once, when the exporter starts, and only they can be asked for: a path is
looked up, never opened. They need nothing from elsewhere, and the policy sent with each of them
lets a browser fetch nothing from elsewhere either.
"""

from __future__ import annotations

import gzip
import threading
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from wattspan.http.messages import HttpResponse
from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock, SnapshotView
from wattspan_exporters.page.document_builder import build_document
from wattspan_exporters.page.history import PageHistory

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "ico": "image/x-icon",
}
"""What is served, by the ends of names; anything else in the folder is not."""

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
"""With every answer: nothing from elsewhere comes in, and nobody elsewhere embeds or reads it."""

STATIC_DIRECTORY = Path(__file__).with_name("static")

LIVE_JSON_PATH = "/live.json"


class _StaticFile(NamedTuple):
    kind: str
    tag: str
    body: bytes
    zipped: bytes


class LivePage:
    """The page. Safe from any thread.

    The figures are written once for each snapshot, and again each second if there is no newer
    one, for it ages: whoever asks meanwhile gets the same bytes.
    """

    def __init__(self, view: SnapshotView, clock: Clock, version: str) -> None:
        self._view, self._clock, self._version = view, clock, version
        self._files = _load(STATIC_DIRECTORY, "/")
        self._memory = PageHistory()
        self._lock = threading.Lock()
        self._written: Snapshot | None = None
        self._age = 0  # in seconds, when it was written
        self._bodies: dict[bool, bytes] = {}

    def remember(self) -> None:
        """Take note of the newest snapshot, if it is time; to be called about every second."""
        self._memory.look(self._view())

    def get(self, path: str, zipped: bool, known: str = "") -> HttpResponse | None:
        """The answer for ``path``, None if it is none of the page's; ``known`` is If-None-Match."""
        if path == LIVE_JSON_PATH:
            with self._lock:
                body = self._body(zipped)
            return _response(body, "application/json", "no-store", zipped)
        file = self._files.get(path)
        if file is None:
            return None
        if file.tag in known:
            return _response(b"", file.kind, "no-cache", False, status=304, ETag=file.tag)
        body = file.zipped if zipped else file.body
        return _response(body, file.kind, "no-cache", zipped, ETag=file.tag)

    def _body(self, zipped: bool) -> bytes:
        snapshot = self._view()
        age = self._clock.monotonic() - snapshot.at.mono
        if snapshot is not self._written or age // SECOND != self._age:
            self._bodies = {False: build_document(snapshot, self._memory, self._version, age)}
            self._written, self._age = snapshot, age // SECOND
        if zipped and True not in self._bodies:
            # Level 1 takes a fraction of the default's time for a few more bytes.
            self._bodies[True] = gzip.compress(self._bodies[False], compresslevel=1, mtime=0)
        return self._bodies[zipped]


def _response(
    body: bytes, kind: str, caching: str, zipped: bool, *, status: int = 200, **more: str
) -> HttpResponse:
    headers = {"Cache-Control": caching, "Vary": "Accept-Encoding", **SECURITY_HEADERS, **more}
    if zipped:
        headers["Content-Encoding"] = "gzip"
    return HttpResponse(status, body, kind, headers)


def _load(folder: Path, path: str) -> dict[str, _StaticFile]:
    """Every file below ``folder`` that has a type, by its path on the site."""
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
