"""A server that answers queries as Prometheus does, or as a test wants it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(
    body: bytes, status: int = 200, headers: dict[str, str] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """A server that sends ``body`` in every response; its address and the received requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def vector(*values: str) -> bytes:
    result = [{"metric": {"n": str(n)}, "value": [1.5, v]} for n, v in enumerate(values)]
    return answer("vector", result)


def answer(kind: str, result: object) -> bytes:
    return json.dumps(
        {"status": "success", "data": {"resultType": kind, "result": result}}
    ).encode()
