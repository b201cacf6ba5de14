"""The real capper without a free descriptor: originals come back, and it does not spin."""

from __future__ import annotations

import socket

import psutil
import pytest
from testbed.capper_fixtures import ORIGINAL, capper_fixture, gpu_fixture, host_fixture
from testbed.capper_process import CapperProcess, Gpu, finish
from testbed.descriptors import no_free_descriptor
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.ports import CapsError

CAP = 500_000

host = host_fixture("one-socket-h100")
gpu = gpu_fixture()


capper = capper_fixture()


def cpu_seconds(capper: CapperProcess) -> float:
    used = psutil.Process(capper.process.pid).cpu_times()
    return float(used.user + used.system)


def test_capper_without_descriptors_waits_for_one_without_spinning(capper: CapperProcess) -> None:
    clock = SystemClock()
    with no_free_descriptor(capper.process.pid), socket.socket(socket.AF_UNIX) as waiting:
        began, used = clock.monotonic(), cpu_seconds(capper)
        waiting.connect(str(capper.sockets / "capper.sock"))
        waiting.settimeout(2)
        with pytest.raises(TimeoutError):
            waiting.recv(1)
        share = (cpu_seconds(capper) - used) * 1e9 / (clock.monotonic() - began)
    assert share < 0.5
    client = capper.client()
    assert client.rows()
    client.close()


def test_capper_without_descriptors_sets_no_limit(capper: CapperProcess, gpu: Gpu) -> None:
    client = capper.client()
    assert client.rows()
    with no_free_descriptor(capper.process.pid), pytest.raises(CapsError, match="no cap is set"):
        client.hold("job", {gpu.key: CAP}, "a test")
    assert gpu.limit == ORIGINAL
    client.close()


def test_capper_without_descriptors_restores_the_original(capper: CapperProcess, gpu: Gpu) -> None:
    with capper.holder(gpu.key, CAP) as holder, no_free_descriptor(capper.process.pid):
        assert gpu.limit == CAP
        finish(holder)
        eventually(lambda: gpu.limit == ORIGINAL, "the original is back")
    eventually(lambda: capper.journal() == [], "the journal is empty")
