"""The live page's files with a world of the test's choosing behind them.

The agent serves its measurements; some states cannot be produced within a second: an hour of
history, eight GPUs, a name of ten kilobytes, a server that goes away. This server serves ``live``
as given by a test, under the same content security policy.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import wattspan_exporters
from wattspan.emulation.control import Closeable

STATIC = Path(wattspan_exporters.__file__).parent / "page" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class PageServer(Closeable):
    """Serves the page on a loopback port; it can be stopped and started again on the same one."""

    def __init__(self, live: Mapping[str, Any]) -> None:
        self.live: Mapping[str, Any] = live
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, kind = owner.answer(self.path)
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Security-Policy", POLICY)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Age", str(owner.live["age"]))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """No reader is connected."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    def answer(self, path: str) -> tuple[bytes, str]:
        if path == "/live.json":
            return json.dumps(self.live).encode(), "application/json"
        file = STATIC / ("index.html" if path == "/" else path.removeprefix("/"))
        known = file.is_file() and file.suffix in KINDS
        return (file.read_bytes(), KINDS[file.suffix]) if known else (b"", "text/plain")

    def __enter__(self) -> Self:
        self.start()
        return self

    def close(self) -> None:
        self.stop()
