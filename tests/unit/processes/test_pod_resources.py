"""Devices of Kubernetes pods: the kubelet's Pod Resources API over its socket."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st
from testbed.kubelet import Kubelet, Pods, encode_claims, encode_pods

from wattspan.model import DevicePod
from wattspan.processes.claimed_gpus import (
    Claim,
    ClaimedGpus,
    DeviceKey,
    NodeGpus,
    ResourceSlices,
    SlicesError,
)
from wattspan.processes.pod_resources import (
    PodResources,
    PodResourcesError,
    decode_allotments,
    list_allotments,
    open_pod_resources,
)

MIG = "MIG-11111111-2222-3333-4444-555555555555"
PODS: Pods = {
    ("ml", "trainer-0"): {"main": [MIG], "sidecar": []},
    ("ml", "notebook"): {"main": ["GPU-a::1", "GPU-a::2"]},
    ("web", "server"): {"main": ["GPU-a::0"]},
    ("kube-system", "dns"): {},
}


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:  # a socket's path is short
        yield Path(directory, "kubelet.sock")


def test_each_pod_of_a_device_is_listed_once() -> None:
    assert decode_allotments(encode_pods(PODS)).devices == (
        DevicePod("GPU-a", "ml", "notebook", "main"),
        DevicePod("GPU-a", "web", "server", "main"),
        DevicePod(MIG, "ml", "trainer-0", "main"),
    )


def test_node_without_pods_has_no_devices() -> None:
    assert decode_allotments(b"") == ((), ())


@given(st.binary() | st.binary(max_size=40).map(lambda noise: encode_pods(PODS)[:-3] + noise))
def test_no_answer_breaks_the_decoder(body: bytes) -> None:
    try:
        devices, _ = decode_allotments(body)
    except PodResourcesError:
        return
    assert all(len(part) <= 253 for one in devices for part in one)


def test_kubelet_is_asked_over_its_socket(path: Path) -> None:
    with Kubelet(path, encode_pods(PODS)):
        assert {one.pod for one in list_allotments(path).devices} == {
            "trainer-0",
            "notebook",
            "server",
        }


def test_long_answer_is_read_whole(path: Path) -> None:
    pods: Pods = {("ml", f"pod-{i}"): {"main": [f"GPU-{i}"]} for i in range(900)}
    with Kubelet(path, encode_pods(pods)):
        assert len(list_allotments(path).devices) == 900


def test_refusal_and_silence_are_reported_and_recovered_from(path: Path) -> None:
    pods = PodResources(path)
    pods.read()
    (health,) = pods.health()
    assert (health.up, health.failures[0].cause) == (False, "no such file or directory")
    with Kubelet(path, encode_pods(PODS)) as kubelet:
        kubelet.status = Status.UNIMPLEMENTED
        pods.read()
        assert "gRPC status 12 no such method" in pods.health()[0].failures[0].cause
        kubelet.status = Status.OK
        pods.read()
        assert len(pods.devices()) == 3
        assert pods.health()[0].failures == ()
    pods.read()
    assert pods.devices() == ()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 60])
def test_other_protocols_are_refused(path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PodResourcesError):
            list_allotments(path, timeout=5)
        thread.join()


def test_server_that_never_ends_its_answer_is_left_at_the_deadline(path: Path) -> None:
    ping = b"\x00\x00\x08\x06" + bytes(13)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b"\x00\x00\x00\x04" + bytes(5))  # SETTINGS
                while not ended.wait(0.01):
                    connection.sendall(ping)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(PodResourcesError, match="timed out"):
                list_allotments(path, timeout=0.3)
        finally:
            ended.set()
            thread.join()


def test_claims_of_the_kubelet_are_resolved_and_missing_ones_reported(path: Path) -> None:
    claim = {"driver": "gpu.nvidia.com", "pool": "n", "device": "gpu-0", "cdi": ["v/c=gpu-0"]}
    pod = {"namespace": "ml", "pod": "a", "container": "main", "claims": [claim]}
    known: dict[str, tuple[str, ...]] = {}
    renders = path.parent / "class/drm/renderD128"
    (path.parent / "0000:0c:00.0").mkdir()
    renders.mkdir(parents=True)
    (renders / "device").symlink_to(path.parent / "0000:0c:00.0")
    pods = PodResources(path, ClaimedGpus(lambda: known, NodeGpus(path.parent, path.parent)))
    with Kubelet(path, encode_pods(PODS) + encode_claims([pod])):
        pods.read()
        (health,) = pods.health()
        assert health.up
        assert "gpu.nvidia.com/n/gpu-0" in str(health.failures[0])
        assert len(pods.devices()) == 3, "a claim that is not found costs no others"
        known["v/c=gpu-0"] = ("/dev/kfd", "/dev/dri/renderD128")
        pods.read()
        assert pods.health()[0].failures == ()
        assert DevicePod("0000:0c:00.0", "ml", "a", "main") in pods.devices()


def test_failure_of_the_api_server_is_reported_and_costs_no_known_device() -> None:
    def fetch(_: str) -> dict[DeviceKey, str]:
        raise SlicesError("it answers HTTP 403")

    slices = ResourceSlices("node-1", fetch)
    claim = Claim("ml", "a", "main", DeviceKey("gpu.nvidia.com", "n", "gpu-0"))
    devices, failures = ClaimedGpus(dict, slices=slices).find((claim,))
    assert devices == ()
    assert "HTTP 403" in str(failures[0])
    assert "gpu-0" in str(failures[1])


def test_setting_selects_the_socket(path: Path) -> None:
    assert open_pod_resources("") is None
    assert open_pod_resources(str(path)) is not None


def test_automatic_kubelet_is_found_when_it_comes(path: Path) -> None:
    assert open_pod_resources("auto", kubelet=path, find=lambda _: None) is None
    pods = open_pod_resources("auto", kubelet=path, find=lambda _: object())
    pods.read()
    assert (pods.devices(), pods.health()) == ((), ())
    with Kubelet(path, encode_pods(PODS)):
        pods.read()
    assert {one.pod for one in pods.devices()} == {"trainer-0", "notebook", "server"}
    pods.read()  # its absence is a failure now
    assert not pods.health()[0].up


@pytest.mark.parametrize("end", ["::2", "-3", "-_-7", "__2", ""])
@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_share_of_any_plugin_is_its_device(kind: str, end: str) -> None:
    device = f"{kind}-11111111-2222-3333-4444-555555555555"
    found = decode_allotments(encode_pods({("ml", "a"): {"main": [device + end]}}))
    assert [one.device for one in found.devices] == [device]
