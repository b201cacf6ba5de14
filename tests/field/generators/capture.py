"""Run a client and write its first trace request as a case of tests/field/otlp_bodies.

    python capture.py OUT.toml --source TEXT --input TEXT --right TEXT -- COMMAND...

The command finds the receiver in OTEL_EXPORTER_OTLP_ENDPOINT: HTTP, or with ``--grpc`` gRPC, which
needs grpcio. ``[expected]`` is to be completed by hand, from what the client was told to send.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

Captured = tuple[str, str, bytes]  # content type, content encoding, body
received: queue.Queue[Captured] = queue.Queue()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            kind = self.headers["content-type"]
            received.put((kind, self.headers.get("content-encoding", ""), body))
        self.send_response(200)
        self.send_header("content-type", self.headers["content-type"])
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def http_receiver() -> str:
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def grpc_receiver() -> str:

    grpc: Any = importlib.import_module("grpc")

    def export(request: bytes, context: Any) -> bytes:
        received.put(("application/grpc", "", request))
        return b""

    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(ThreadPoolExecutor(2))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Export": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    globals()["_server"] = server
    return f"http://127.0.0.1:{port}"


def document(words: Mapping[str, str], captured: Captured) -> str:
    kind, encoding, body = captured
    lines = [f"{key} = {json.dumps(value)}" for key, value in words.items()]
    lines += ["", "[request]", f"content_type = {json.dumps(kind)}"]
    if encoding:
        lines.append(f"content_encoding = {json.dumps(encoding)}")
    if kind == "application/json" and not encoding and b"'''" not in body:
        lines.append(f"body = '''{body.decode()}'''")
    else:
        text = base64.b64encode(body).decode()
        cut = "\n".join(text[at : at + 96] for at in range(0, len(text), 96))
        lines.append(f'body_base64 = """\n{cut}"""')
    return "\n".join([*lines, "", "[expected]", "rejected = 0", "names = []", ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for name in ("source", "input", "right"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    endpoint = grpc_receiver() if asked.grpc else http_receiver()
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    subprocess.run(asked.command, env=environment, check=True, timeout=60)
    words = {"id": asked.out.stem}
    words |= {name: getattr(asked, name) for name in ("source", "input", "right")}
    asked.out.write_text(document(words, received.get(timeout=10)), encoding="utf-8")


main()
