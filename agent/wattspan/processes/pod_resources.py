"""Devices of Kubernetes pods, from the Pod Resources API of the node's kubelet.

The API is one gRPC call over a Unix socket that only root can reach. It names the pods to which
device plugins have allotted devices: a whole GPU, a MIG instance, or a share of a GPU (``GPU-…::2``
of NVIDIA's plugin, other endings of others), several of which are one device. The plugin of
Google's clusters names boards by their nodes (``nvidia0``, ``nvidia0/vgpu2``): `ClaimedGpus` finds
their UUIDs. Devices of Dynamic Resource Allocation are named by driver, pool and device: it finds
the GPUs by the specifications of the node or by the API server. The answer names the devices that a
pod may use, not those that it uses: energy is divided among pods by their processes.

The format is that of ``podresources/v1`` (``k8s.io/kubelet``): claims are in it since Kubernetes
1.34, and since 1.32 with the feature gate KubeletPodResourcesDynamicResources.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import monotonic  # noqa: TID251 - deadlines of sockets are in real time
from typing import NamedTuple

from wattspan.model import DevicePod, Failure, SourceHealth, Trouble
from wattspan.processes.claimed_gpus import Claim, ClaimedGpus, DeviceKey, ResourceSlices
from wattspan.util.encoding import frame_message
from wattspan.util.protobuf import parse_message
from wattspan.util.text import clean_label, pip_command

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
METHOD = "/v1.PodResourcesLister/List"
INTERVAL = 10.0  # seconds
TIMEOUT = 5.0  # seconds
MAX_BYTES = 16 << 20
MAX_PODS = 1000
"""A kubelet runs at most some hundred pods."""

_SHARE = re.compile(
    r"((?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?:-_-|__|-)[0-9]+",
    re.IGNORECASE,
)
"""A share of a device by the plugins of HAMi and AMD (``-3``), gpushare (``-_-7``) and nvshare
(``__2``)."""

_MAX_LABEL = 253  # of a name in Kubernetes
_MAX_CDI_NAME = 1024


class PodResourcesError(Exception):
    """The kubelet's answer is not available; the message is the cause."""


class Allotments(NamedTuple):
    """The devices of device plugins, and the claims, each once and in a stable order."""

    devices: tuple[DevicePod, ...] = ()
    claims: tuple[Claim, ...] = ()


def decode_allotments(body: bytes) -> Allotments:
    """The content of a ``ListPodResourcesResponse``; PodResourcesError."""
    message = parse_message("ListPodResources", body)
    if message is None:
        raise PodResourcesError("its answer is malformed")
    devices: set[DevicePod] = set()
    claims: set[Claim] = set()
    for pod in message.pods:
        for container in pod.containers:
            names = (_text(pod.namespace), _text(pod.name), _text(container.name))
            for device in (one for devices in container.devices for one in devices.ids):
                devices.add(DevicePod(_shared_device(_text(device)), *names))
            for one in (one for resource in container.claims for one in resource.devices):
                key = DeviceKey(_text(one.driver), _text(one.pool), _text(one.device))
                cdi = tuple(_text(each.name, _MAX_CDI_NAME) for each in one.cdi)
                claims.add(Claim(*names, key, cdi))
    return Allotments(tuple(sorted(devices)[:MAX_PODS]), tuple(sorted(claims)[:MAX_PODS]))


def _shared_device(name: str) -> str:
    """The device of which a name is a share; otherwise the name."""
    share = _SHARE.fullmatch(name)
    return share[1] if share else name.partition("::")[0]


def _text(value: bytes, longest: int = _MAX_LABEL) -> str:
    return clean_label(value.decode(errors="replace"), longest)


def list_allotments(path: Path, timeout: float = TIMEOUT) -> Allotments:
    """The devices of all pods of the node; PodResourcesError.

    ``timeout`` is the seconds for the whole answer, however slowly the server sends it.
    """
    try:
        return decode_allotments(_call(path, timeout))
    except OSError as error:
        raise PodResourcesError((error.strerror or str(error)).lower()) from None
    except ImportError:
        raise PodResourcesError("the package h2 is not installed") from None


def _call(path: Path, timeout: float) -> bytes:
    """The message that the kubelet answers to an empty request."""
    from wattspan.util.grpc_client import GrpcConnection, ResponseTooLargeError

    deadline = monotonic() + timeout

    def timed(connection: socket.socket) -> socket.socket:
        left = deadline - monotonic()
        if left <= 0:
            raise PodResourcesError("timed out")
        connection.settimeout(left)
        return connection

    headers = {":scheme": "http", ":path": METHOD, ":authority": "localhost"}
    with socket.socket(socket.AF_UNIX) as kubelet:
        timed(kubelet).connect(str(path))
        try:
            connection = GrpcConnection(
                lambda: timed(kubelet).recv(65536),
                lambda data: timed(kubelet).sendall(data),
                MAX_BYTES,
            )
            reply = connection.call(headers, frame_message(b""))
        except (PodResourcesError, OSError):
            raise
        except ResponseTooLargeError:
            raise PodResourcesError("its answer is longer than 16 MiB") from None
        except Exception as error:  # noqa: BLE001 - h2 and hpack have errors of their own
            raise PodResourcesError(f"its protocol is not gRPC: {error}") from None
    status, text = reply.status
    if status:
        text = clean_label(text, _MAX_LABEL)
        raise PodResourcesError(f"it answers gRPC status {status:d} {text}".rstrip())
    if reply.flag:  # compression was not offered
        raise PodResourcesError("its answer is compressed")
    return reply.message


class PodResources:
    """The newest devices of pods; a thread asks the kubelet every ten seconds."""

    def __init__(
        self, path: Path, claimed: ClaimedGpus | None = None, *, awaited: bool = False
    ) -> None:
        """``awaited``: the kubelet may come later or never, which is no failure until it comes."""
        self._path = path
        self._awaited = awaited
        self._claimed = claimed or ClaimedGpus()
        self._devices: tuple[DevicePod, ...] = ()
        self._failures: tuple[Failure, ...] = ()
        self._reads = self._failed = 0
        self._up = True

    def devices(self) -> tuple[DevicePod, ...]:
        """The devices by the newest answer; () while the kubelet does not answer."""
        return self._devices

    def read(self) -> None:
        """Ask once."""
        if self._awaited and not os.access(self._path, os.R_OK | os.W_OK):
            return
        self._awaited = False
        self._reads += 1
        try:
            allotted = list_allotments(self._path)
        except PodResourcesError as error:
            self._failed += 1
            self._up, self._devices = False, ()
            failure = Failure(
                "pods",
                f"the kubelet's devices of pods at {self._path}",
                Trouble.RETRY,
                str(error),
                f"Mount the socket and run {pip_command('h2')}, or set "
                '[processes] pod_resources = "".',
            )
            self._failures = (failure,)
            return
        claimed, self._failures = self._claimed.find(allotted.claims)
        self._devices = tuple(sorted({*self._claimed.by_uuid(allotted.devices), *claimed}))
        self._up = True

    def run(self, stop: threading.Event) -> None:
        """Ask until ``stop`` is set."""
        while not stop.is_set():
            self.read()
            stop.wait(INTERVAL)

    def health(self) -> tuple[SourceHealth, ...]:
        """The health of the source ``pods``; () while there is no kubelet."""
        if self._awaited:
            return ()
        return (SourceHealth("pods", self._up, self._reads, self._failed, self._failures),)


def open_pod_resources(
    setting: str,
    node: str = "",
    *,
    kubelet: Path = SOCKET,
    find: Callable[[str], object] = find_spec,
) -> PodResources | None:
    """The kubelet by the setting ``pod_resources``; None without one.

    "auto" is the kubelet at ``kubelet`` as soon as the agent may use it, if h2 is
    installed.
    ``node`` is the name of this node for the API server; it is not asked without one.
    """
    claimed = ClaimedGpus(slices=ResourceSlices(node) if node else None)
    if setting == "auto":
        return PodResources(kubelet, claimed, awaited=True) if find("h2") is not None else None
    return PodResources(Path(setting), claimed) if setting else None
