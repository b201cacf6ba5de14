"""Devices of Kubernetes pods, from the Pod Resources API of the node's kubelet.

The API is one gRPC call over a Unix socket that only root can reach. It names the pods to which
device plugins have allotted devices: a whole GPU, a MIG instance, or a replica of a shared GPU
(``GPU-…::2``), several of which are one device. The answer names the devices that a pod may use,
not those that it uses: energy is divided among pods by their processes.

The format is that of ``podresources/v1`` (``k8s.io/kubelet``).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from time import monotonic  # noqa: TID251 - deadlines of sockets are in real time
from typing import Any

from wattspan.model import DevicePod, Failure, SourceHealth, Trouble
from wattspan.util.encoding import FRAME_PREFIX, frame_message
from wattspan.util.protobuf import parse_message
from wattspan.util.text import clean_label

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
METHOD = "/v1.PodResourcesLister/List"
INTERVAL = 10.0  # seconds
TIMEOUT = 5.0  # seconds
MAX_BYTES = 16 << 20
MAX_PODS = 1000
"""A kubelet runs at most some hundred pods."""

_MAX_LABEL = 253  # of a name in Kubernetes


class PodResourcesError(Exception):
    """The kubelet's answer is not available; the message is the cause."""


def decode_devices(body: bytes) -> tuple[DevicePod, ...]:
    """The devices in a ``ListPodResourcesResponse``, each pod once, in a stable order."""
    message = parse_message("ListPodResources", body)
    if message is None:
        raise PodResourcesError("its answer is malformed")
    return tuple(sorted(set(_devices(message)))[:MAX_PODS])


def _devices(message: Any) -> Iterator[DevicePod]:
    for pod in message.pods:
        for container in pod.containers:
            for devices in container.devices:
                for device in devices.ids:
                    identity = _text(device).partition("::")[0]
                    names = (_text(pod.namespace), _text(pod.name), _text(container.name))
                    yield DevicePod(identity, *names)


def _text(value: bytes) -> str:
    return clean_label(value.decode(errors="replace"), _MAX_LABEL)


def list_devices(path: Path, timeout: float = TIMEOUT) -> tuple[DevicePod, ...]:
    """The devices of all pods of the node; PodResourcesError.

    ``timeout`` is the seconds for the whole answer, however slowly the server sends it.
    """
    try:
        return decode_devices(_call(path, timeout))
    except OSError as error:
        raise PodResourcesError((error.strerror or str(error)).lower()) from None
    except ImportError:
        raise PodResourcesError("wattspan is installed without its extra grpc") from None


def _call(path: Path, timeout: float) -> bytes:
    """The message that the kubelet answers to an empty request."""
    from h2.config import H2Configuration
    from h2.connection import H2Connection
    from h2.exceptions import ProtocolError

    deadline = monotonic() + timeout
    http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": METHOD,
        ":authority": "localhost",
        "te": "trailers",  # codespell:ignore te
        "content-type": "application/grpc",
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        http2.initiate_connection()
        http2.send_headers(1, list(headers.items()))
        http2.send_data(1, frame_message(b"", zipped=False), end_stream=True)
        try:
            return _answer(http2, connection, deadline)
        except ProtocolError as error:
            raise PodResourcesError(f"its protocol is not gRPC: {error}") from None


def _answer(http2: Any, connection: socket.socket, deadline: float) -> bytes:
    from h2 import events

    body, status = bytearray(), ""
    while True:
        connection.settimeout(_left(deadline))
        connection.sendall(http2.data_to_send())
        connection.settimeout(_left(deadline))
        received = connection.recv(65536)
        if not received:
            raise PodResourcesError("it closed the connection")
        for event in http2.receive_data(received):
            match event:
                case events.ResponseReceived() | events.TrailersReceived():
                    fields: dict[str, str] = {str(k): str(v) for k, v in event.headers}
                    status = fields.get("grpc-status", status)
                    if status not in {"", "0"}:
                        text = clean_label(fields.get("grpc-message", ""), _MAX_LABEL)
                        raise PodResourcesError(f"it answers gRPC status {status} {text}".rstrip())
                case events.DataReceived():
                    http2.acknowledge_received_data(event.flow_controlled_length, 1)
                    body += event.data
                    if len(body) > MAX_BYTES:
                        raise PodResourcesError("its answer is longer than 16 MiB")
                case events.StreamEnded():
                    return _message(bytes(body))
                case events.StreamReset() | events.ConnectionTerminated():
                    raise PodResourcesError("it ended the call")


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise PodResourcesError("timed out")
    return left


def _message(frame: bytes) -> bytes:
    """The message in the frame of a reply; compression was not offered."""
    if len(frame) < FRAME_PREFIX.size:
        raise PodResourcesError("its answer is incomplete")
    flag, length = FRAME_PREFIX.unpack_from(frame)
    message = frame[FRAME_PREFIX.size :]
    if flag or length != len(message):
        raise PodResourcesError("its answer is incomplete or compressed")
    return message


class PodResources:
    """The newest devices of pods; a thread asks the kubelet every ten seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._devices: tuple[DevicePod, ...] = ()
        self._failure: Failure | None = None
        self._reads = self._failed = 0

    def devices(self) -> tuple[DevicePod, ...]:
        """The devices by the newest answer; () while the kubelet does not answer."""
        return self._devices

    def read(self) -> None:
        """Ask once."""
        self._reads += 1
        try:
            self._devices, self._failure = list_devices(self._path), None
        except PodResourcesError as error:
            self._failed += 1
            self._devices = ()
            self._failure = Failure(
                "pods",
                f"the kubelet's devices of pods at {self._path}",
                Trouble.RETRY,
                str(error),
                "Mount the socket and install wattspan[grpc], or set "
                '[processes] pod_resources = "".',
            )

    def run(self, stop: threading.Event) -> None:
        """Ask until ``stop`` is set."""
        while not stop.is_set():
            self.read()
            stop.wait(INTERVAL)

    def health(self) -> tuple[SourceHealth, ...]:
        failure = self._failure
        failures = () if failure is None else (failure,)
        return (SourceHealth("pods", failure is None, self._reads, self._failed, failures),)


def open_pod_resources(
    setting: str, *, kubelet: Path = SOCKET, find: Callable[[str], object] = find_spec
) -> PodResources | None:
    """The kubelet by the setting ``pod_resources``; None without one.

    "auto" is the kubelet at ``kubelet``, if the agent may use it and the extra grpc is installed.
    """
    if setting == "auto":
        usable = os.access(kubelet, os.R_OK | os.W_OK) and find("h2") is not None
        return PodResources(kubelet) if usable else None
    return PodResources(Path(setting)) if setting else None
