"""A stand-in for dcgm-exporter, with the metrics that a test gives it."""

from __future__ import annotations

import http.server
import threading

LABELS = 'gpu="0",UUID="{}",modelName="NVIDIA A100",GPU_I_PROFILE="3g.20gb",GPU_I_ID="{}"'


def series(name: str, board: str, instance: str, value: str) -> str:
    return f"DCGM_FI_PROF_{name}{{{LABELS.format(board, instance)}}} {value}"


class DcgmServer:
    """An HTTP server with the metrics of an exporter."""

    def __init__(self) -> None:
        exporter = self
        self.status, self.body = 200, b""
        self.headers: dict[str, str] = {}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(exporter.status)
                for name, value in exporter.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(exporter.body)))
                self.end_headers()
                self.wfile.write(exporter.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/metrics"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
