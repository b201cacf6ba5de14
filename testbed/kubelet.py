"""A stand-in for a kubelet: its Pod Resources API on a Unix socket, by a gRPC server of grpclib."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Server

from wattspan.emulation.control import Closeable
from wattspan.util.protobuf import encode_message, length_delimited

METHOD = "/v1.PodResourcesLister/List"

Pods = dict[tuple[str, str], dict[str, list[str]]]
"""Containers with their devices, by namespace and pod."""


class _BytesCodec(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


def text(number: int, value: str) -> tuple[int, bytes]:
    """A field of a message."""
    return number, value.encode()


def encode_pods(pods: Pods) -> bytes:
    """A ListPodResourcesResponse as a kubelet sends it, with CPUs and NUMA nodes."""
    body = b""
    for (namespace, name), containers in pods.items():
        pod = encode_message([text(1, name), text(2, namespace)])
        for container, ids in containers.items():
            devices = encode_message(
                [text(1, "nvidia.com/gpu"), *(text(2, one) for one in ids), (3, b"\n\x00")]
            )
            pod += length_delimited(3, encode_message([text(1, container), (2, devices)]))
        body += length_delimited(1, pod)
    return body


def encode_claims(pods: Iterable[Mapping[str, Any]]) -> bytes:
    """Pods of a ListPodResourcesResponse with devices of Dynamic Resource Allocation.

    Each has ``namespace``, ``pod``, ``container`` and ``claims`` with ``driver``, ``pool``,
    ``device``, ``cdi`` and perhaps ``share``, as Kubernetes 1.34 and later send them.
    """
    body = b""
    for one in pods:
        container = encode_message([text(1, one["container"])])
        for claim in one["claims"]:
            device = encode_message(
                [
                    *((1, encode_message([text(1, name)])) for name in claim.get("cdi", ())),
                    *(text(n, claim[k]) for n, k in ((2, "driver"), (3, "pool"), (4, "device"))),
                    *([text(5, claim["share"])] if "share" in claim else ()),
                ]
            )
            resource = encode_message([text(2, "claim"), text(3, one["namespace"]), (4, device)])
            container += length_delimited(5, resource)
        pod = encode_message([text(1, one["pod"]), text(2, one["namespace"]), (3, container)])
        body += length_delimited(1, pod)
    return body


class Kubelet(Closeable):
    """Serves ``body`` until it is closed; ``status`` other than OK refuses."""

    def __init__(self, path: Path, body: bytes = b"") -> None:
        self.path, self.body, self.status = path, body, Status.OK
        self._loop = asyncio.new_event_loop()
        self._server: Any = None
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __mapping__(self) -> dict[str, Handler]:
        return {METHOD: Handler(self._list, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _list(self, stream: Any) -> None:
        assert await stream.recv_message() == b""
        if self.status is not Status.OK:
            raise GRPCError(self.status, "no such method")
        await stream.send_message(self.body)

    def __enter__(self) -> Self:
        async def serve() -> None:
            self._server = Server([self], codec=_BytesCodec())  # it takes the running loop
            await self._server.start(path=str(self.path))

        self._thread.start()
        asyncio.run_coroutine_threadsafe(serve(), self._loop).result(10)
        return self

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            await self._server.wait_closed()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
