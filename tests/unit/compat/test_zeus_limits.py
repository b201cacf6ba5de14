"""Limits of GPUs by Zeus's names: a real capper's server over boards that are only numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from testbed.capper_bench import Bench, W
from testbed.capper_server import CapperServer
from testbed.fixtures import entered, short_path
from testbed.forks import in_child
from testbed.metered_devices import MeteredDevices, gpu
from testbed.waiting import eventually

from wattspan.compat.zeus.hardware import GPU, GPUs
from wattspan.compat.zeus.limits import (
    HeldLimits,
    ZeusGPUNoPermissionError,
    ZeusGPUNotSupportedError,
)
from wattspan.sdk import AgentUnavailableError

BOARDS = tuple(gpu(i)._replace(id=f"gpu{i}") for i in range(2))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


path = entered(lambda: short_path("capper.sock"))


@pytest.fixture
def server(bench: Bench, path: Path) -> Iterator[CapperServer]:
    with CapperServer(bench, path) as server:
        yield server


def agent_of(server: CapperServer) -> Callable[..., dict[str, Any]]:
    """Answers ``/v1/caps`` as an agent does."""

    def ask(target: str, parameters: object) -> dict[str, Any]:
        assert target == "/v1/caps"
        state = msgspec.to_builtins(server.desk.state())
        return {"capper": {"socket": str(server.path), "state": state}}

    return ask


@pytest.fixture
def limits(server: CapperServer) -> Iterator[HeldLimits]:
    limits = HeldLimits(agent_of(server))
    yield limits
    for number in range(2):
        limits.release(server.bench.key(number))


@pytest.fixture
def gpus(limits: HeldLimits) -> GPUs:
    return GPUs(read=MeteredDevices(BOARDS), limits=limits)


def test_limit_is_held_until_it_is_reset(gpus: GPUs, bench: Bench) -> None:
    gpus.set_power_management_limit(1, 500 * W)
    gpus.set_power_management_limit(0, 450 * W)
    assert bench.stands == [450 * W, 500 * W]
    assert gpus.get_power_management_limit(1) == 500 * W
    assert gpus.get_power_management_limit_constraints(1) == (200 * W, 700 * W)
    gpus.reset_power_management_limit(1)
    gpus.reset_power_management_limit(1)
    eventually(lambda: bench.stands == [450 * W, 650 * W], "the original of one")


@pytest.mark.parametrize(
    ("asked", "cause"),
    [(300, "no lower than its minimum and the operator's floor"), (690, "no higher")],
)
def test_limit_that_is_not_in_force_is_an_error_and_the_one_before_stays(
    gpus: GPUs, bench: Bench, asked: int, cause: str
) -> None:
    gpus.set_power_management_limit(0, 500 * W)
    with pytest.raises(ZeusGPUNoPermissionError, match=cause):
        gpus.set_power_management_limit(0, asked * W)
    eventually(lambda: bench.stands[0] == 500 * W, "the limit before")


def test_limit_goes_down_in_the_steps_of_the_capper(path: Path, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.limits = replace(bench.limits, largest_step=0.1)
    with CapperServer(bench, path) as server:
        limits = HeldLimits(agent_of(server))
        gpu = GPU(0, MeteredDevices(BOARDS), limits)
        gpu.set_power_management_limit(640 * W, block=False)
        gpu.set_power_management_limit(450 * W)
        assert bench.stands[0] == 450 * W
        limits.release(bench.key())


def test_user_without_the_right_is_told_the_setting(bench: Bench, path: Path) -> None:
    with CapperServer(bench, path, allowed=frozenset({os.getuid() + 1})) as server:
        gpu = GPU(0, MeteredDevices(BOARDS), HeldLimits(agent_of(server)))
        with pytest.raises(ZeusGPUNoPermissionError, match=r"name it in \[caps\] users"):
            gpu.set_power_management_limit(500 * W)
        assert gpu.get_power_management_limit() == 650 * W
    assert bench.stands[0] == 650 * W


def test_limit_of_another_job_is_left(gpus: GPUs, server: CapperServer, bench: Bench) -> None:
    other = server.client()
    other.hold("job", {bench.key(): 600 * W}, "why")
    with pytest.raises(ZeusGPUNoPermissionError, match="is held for 'job'"):
        gpus.set_power_management_limit(0, 500 * W)
    assert bench.stands[0] == 600 * W
    other.close()


def test_limit_is_held_again_by_the_next_capper(bench: Bench, path: Path) -> None:
    with CapperServer(bench, path) as server:
        limits = HeldLimits(agent_of(server))
        limits.hold(bench.key(), 500 * W)
    assert bench.stands[0] == 650 * W
    with CapperServer(bench, path):
        eventually(lambda: bench.stands[0] == 500 * W, "the limit")
        limits.release(bench.key())


def test_child_of_a_fork_holds_its_own_limits_and_ends_none_of_its_parent(
    server: CapperServer, bench: Bench
) -> None:
    limits = HeldLimits(lambda *_: {"capper": {"socket": str(server.path)}})
    limits.hold(bench.key(), 500 * W)

    def child() -> str:
        limits.forget()  # `held_limits` does it at the fork
        limits.release(bench.key())
        limits.hold(bench.key(1), 450 * W)
        return "held"

    assert in_child(child) == "held"
    eventually(lambda: bench.stands[1] == 650 * W, "the limit of the child ends with it")
    assert bench.stands[0] == 500 * W
    limits.hold(bench.key(), 480 * W)
    assert bench.stands[0] == 480 * W
    limits.release(bench.key())


def test_foreign_limit_ends_all_holds_with_a_warning(
    gpus: GPUs, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.set_power_management_limit(0, 500 * W)
    bench.board(0).stands = 600 * W
    eventually(lambda: "holds no limits any more" in caplog.text, "a warning")
    assert bench.stands[0] == 600 * W


def test_missing_capper_and_agent_are_named() -> None:
    def no_agent(*_: object) -> dict[str, Any]:
        raise AgentUnavailableError("No wattspan agent answers.")

    for ask, cause in ((lambda *_: {"capper": None}, "No capper runs"), (no_agent, "No wattspan")):
        gpu = GPU(0, MeteredDevices(BOARDS), HeldLimits(ask))
        with pytest.raises(ZeusGPUNotSupportedError, match=cause):
            gpu.set_power_management_limit(500 * W)
        with pytest.raises(ZeusGPUNotSupportedError, match=cause):
            gpu.get_power_management_limit()


def test_knob_that_the_capper_does_not_set_is_named(gpus: GPUs) -> None:
    with pytest.raises(ZeusGPUNotSupportedError, match="No gpu_clock of 'gpu0'"):
        gpus.set_gpu_locked_clocks(0, 1200, 1200)
