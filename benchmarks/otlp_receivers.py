"""Receivers on loopback that accept any data, over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpclib.protocol
from grpclib.config import Configuration
from h2.config import H2Configuration


class _Taking(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def over_http() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taking)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _TakingCalls(grpclib.protocol.AbstractHandler):  # type: ignore[misc]
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, stream: Any, headers: object, release_stream: Callable[[], None]) -> None:
        task = asyncio.get_running_loop().create_task(self._take(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: release_stream())

    async def _take(self, stream: Any) -> None:
        prefix = await stream.recv_data(5)
        await stream.recv_data(int.from_bytes(prefix[1:], "big"))
        await stream.send_headers([(":status", "200"), ("content-type", "application/grpc")])
        await stream.send_data(bytes(5))
        await stream.send_headers([("grpc-status", "0")], end_stream=True)

    def cancel(self, stream: object) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def over_grpc() -> Iterator[str]:
    loop, ready = asyncio.new_event_loop(), threading.Event()
    over = asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        server = await loop.create_server(
            lambda: grpclib.protocol.H2Protocol(
                _TakingCalls(),
                Configuration().__for_server__(),
                H2Configuration(client_side=False, header_encoding="ascii"),
            ),
            "127.0.0.1",
            0,
        )
        urls.append(f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await over.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
