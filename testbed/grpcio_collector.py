"""A collector on gRPC's own library, in a process of ``.venv-apps``, behind a relay that counts."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from testbed.requirements import APPS
from testbed.waiting import eventually

_SERVER = """
import hashlib, json, sys
from concurrent import futures
import grpc

told = json.loads(sys.argv[1])
ANSWER = bytes.fromhex(told["answer"])

class Takes(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(self.take)

    def take(self, message, context):
        if told["zips"]:
            context.set_compression(grpc.Compression.Gzip)
        seen = {"size": len(message), "sha256": hashlib.sha256(message).hexdigest()}
        print(json.dumps(seen), flush=True)
        return ANSWER

options = [] if told["knows_gzip"] else [("grpc.compression_enabled_algorithms_bitset", 1)]
server = grpc.server(futures.ThreadPoolExecutor(1), [Takes()], options=options)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
server.stop(None)
"""


@dataclass
class Relay:
    """Bytes on their way to ``port``, counted in each direction."""

    port: int
    there: bytearray = field(default_factory=bytearray)
    back: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"grpc://127.0.0.1:{self._listening.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listening]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self.port))
                self._sockets += [client, server]
                self._begin(self._carry, client, server, self.there)
                self._begin(self._carry, server, client, self.back)

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                seen += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()


@dataclass
class GrpcioCollector:
    relay: Relay
    messages: list[dict[str, object]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.relay.url

    def has(self, *messages: bytes) -> None:
        """Wait until it got these, decompressed by itself, and see that it got no others."""
        expected = [
            {"size": len(each), "sha256": hashlib.sha256(each).hexdigest()} for each in messages
        ]
        eventually(lambda: len(self.messages) >= len(expected), "the messages at the collector")
        assert self.messages == expected


@contextmanager
def grpcio_collector(
    *, knows_gzip: bool = True, zips: bool = False, answer: bytes = b""
) -> Iterator[GrpcioCollector]:
    """``zips``: its ``answer`` to each request comes compressed by gzip."""
    told = json.dumps({"knows_gzip": knows_gzip, "zips": zips, "answer": answer.hex()})
    environ = {"PATH": os.environ["PATH"]}
    server = subprocess.Popen(
        [APPS, "-c", _SERVER, told], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        relay = Relay(int(server.stdout.readline()))
        collector = GrpcioCollector(relay)

        def read() -> None:
            for line in server.stdout or ():
                collector.messages.append(json.loads(line))

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        try:
            yield collector
        finally:
            relay.close()
            server.stdin.close()
            reading.join()
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()
