"""`wattspan capper` under a service manager: its socket, its readiness, its reloads."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.capper_fixtures import ORIGINAL, gpu_fixture, host_fixture
from testbed.capper_process import CapperProcess, Gpu
from testbed.fixtures import entered
from testbed.power_limits import restore
from testbed.program import Running, wattspan
from testbed.service_manager import ServiceManager
from testbed.waiting import eventually

from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.emulation.host import EmulatedHost
from wattspan.model import CapKey, Knob
from wattspan.ports import CapsError

CAP = 500_000

HANDED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="capper")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Starts a program as a service manager does that listens in its place."""


host = host_fixture("one-socket-h100")
gpu = gpu_fixture()


manager = entered(lambda: ServiceManager(watchdog=3.0))


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """The listening socket of the service manager."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "capper.sock"))
        listener.listen()
        yield listener


def activated(
    host: EmulatedHost,
    tmp_path: Path,
    listener: socket.socket,
    manager: ServiceManager,
    **settings: object,
) -> CapperProcess:
    return CapperProcess(
        host,
        tmp_path,
        within=[sys.executable, "-c", HANDED, str(listener.fileno())],
        handed=[listener.fileno()],
        sockets=tmp_path,
        environ=manager.environ,
        **{"autotune__floor": 0.3, **settings},
    )


def test_capper_serves_an_inherited_socket_and_leaves_it(
    host: EmulatedHost,
    gpu: Gpu,
    tmp_path: Path,
    listener: socket.socket,
    manager: ServiceManager,
) -> None:
    client = CapperClient(tmp_path / "capper.sock", SystemClock(), who="test", timeout=20.0)
    with activated(host, tmp_path, listener, manager) as capper:
        client.hold("job", {gpu.key: CAP}, "why")  # the client connected before the capper listened
        assert gpu.limit == CAP
        manager.reads(lambda told: "1 cap in force" in told, "the status tells of the cap")
        manager.hears("WATCHDOG=1", 3)
        assert f"Serving {tmp_path / 'capper.sock'}" in capper.said
        assert capper.end() == 0
    assert gpu.limit == ORIGINAL
    assert manager.count("STOPPING=1") == 1
    assert (tmp_path / "capper.sock").is_socket()
    with activated(host, tmp_path, listener, manager) as capper:
        eventually(lambda: _holds(client, gpu), f"whoever held holds again: {capper.said}")
        assert gpu.limit == CAP
        capper.end(signal.SIGKILL)
        assert gpu.limit == CAP
    with activated(host, tmp_path, listener, manager):
        manager.hears("READY=1", 3)
        assert gpu.limit == ORIGINAL  # restored before readiness
    client.close()


def _holds(client: CapperClient, gpu: Gpu) -> bool:
    try:
        client.hold("job", {gpu.key: CAP}, "why")
    except CapsError:
        return False
    return True


def test_invalid_inherited_socket_is_a_one_line_error(
    host: EmulatedHost, tmp_path: Path, manager: ServiceManager
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as network,
        activated(host, tmp_path, network, manager) as capper,
    ):
        assert capper.process.wait(60) == 4
        assert "Cannot serve the socket of the service manager" in capper.said
        assert "Traceback" not in capper.said
        assert manager.count("READY=1") == 0


def test_capper_with_an_invalid_configuration_ends_and_closes_clients(
    host: EmulatedHost, tmp_path: Path, listener: socket.socket, manager: ServiceManager
) -> None:
    # a waiting client would make the service manager restart the capper endlessly
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(str(tmp_path / "capper.sock"))
        with activated(host, tmp_path, listener, manager, autotune__floor="low") as capper:
            assert capper.process.wait(60) == 2
        waiting.settimeout(5)
        assert b"cannot start" in waiting.makefile("rb").read()


def test_limits_are_restored_with_any_configuration(
    host: EmulatedHost, gpu: Gpu, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[caps]\nfloor_wats = 100\n")
    with CapperProcess(host, tmp_path) as capper:
        holder = capper.ready().holder(gpu.key, CAP)
        assert gpu.limit == CAP
        capper.end(signal.SIGKILL)
        holder.kill()
        holder.communicate()
        told = wattspan(
            *("caps", "restore", "--config", str(broken), "--emulated", str(host.directory)),
            WATTSPAN_AGENT_STATE_DIR=str(capper.state_dir),
            WATTSPAN_AGENT_RUN_DIR=str(capper.sockets),
        )
    assert told.returncode == 0, told.stderr
    assert "floor_wats" in told.stderr
    assert gpu.limit == ORIGINAL


@pytest.mark.needs_root
def test_restore_from_a_guessed_directory_is_not_a_success(
    host: EmulatedHost, gpu: Gpu, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    apart = 'mount -t tmpfs none /var/lib && mount -t tmpfs none /run && exec "$@"'
    with CapperProcess(host, tmp_path) as capper:
        client = capper.ready().client()
        client.hold("job", {gpu.key: CAP}, "why")
        capper.end(signal.SIGKILL)
        client.close()
        named = f'state_dir = "{capper.state_dir}"\nrun_dir = "{capper.sockets}"\n'
        words = ("caps", "restore", "--config", str(broken), "--emulated", str(host.directory))
        broken.write_text(f"[agent\n{named}")
        guessed = wattspan(*words, within=["unshare", "-m", "sh", "-c", apart, "sh"])
        assert gpu.limit == CAP
        broken.write_text(f"[agent]\n{named}[caps]\nfloor_wats = 100\n")
        told = wattspan(*words)
    assert guessed.returncode == 6
    assert "/var/lib/wattspan/capper-emulated was only guessed" in guessed.stderr
    assert told.returncode == 0, told.stderr
    assert "was only guessed" not in told.stderr
    assert gpu.limit == ORIGINAL


def test_unconfigured_actuator_is_restored(host: EmulatedHost, gpu: Gpu, tmp_path: Path) -> None:
    clock = CapKey(Knob.GPU_CLOCK, gpu.key.device)
    with CapperProcess(host, tmp_path, autotune__knobs="gpu_clock") as capper:
        client = capper.ready().client()
        client.hold("job", {clock: 1_500}, "why")
        capper.end(signal.SIGKILL)
        client.close()
        assert [entry["knob"] for entry in capper.journal()] == ["gpu_clock"]
        told = wattspan(
            *("caps", "restore", "--emulated", str(host.directory)),
            WATTSPAN_AGENT_STATE_DIR=str(capper.state_dir),
            WATTSPAN_AGENT_RUN_DIR=str(capper.sockets),
            WATTSPAN_AUTOTUNE_KNOBS="gpu_power",
        )
        assert told.returncode == 0, told.stderr
        assert told.stdout.endswith("\n1 limit was restored by the journal.\n")
        assert capper.journal() == []


def test_reload_keeps_leases_and_imposes_new_limits(
    host: EmulatedHost, gpu: Gpu, tmp_path: Path, manager: ServiceManager
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[autotune]\nfloor = 0.3\n")
    with CapperProcess(
        host, tmp_path, arguments=["--config", str(file)], environ=manager.environ
    ) as capper:
        manager.hears("READY=1")
        client = capper.client()
        client.hold("job", {gpu.key: CAP}, "why")
        file.write_text("[autotune]\nflor = 0.3\n")
        capper.process.send_signal(signal.SIGHUP)
        manager.hears("READY=1", 2)
        assert manager.status.startswith("Not reloaded: ")
        client.rows(renew=True)
        assert gpu.limit == CAP
        file.write_text(
            '[autotune]\nfloor = 0.3\n[[caps.fixed]]\ndevice = "*"\nknob = "gpu_power"\n'
            "watts = 450\n"
        )
        capper.process.send_signal(signal.SIGHUP)
        manager.hears("READY=1", 3)
        assert manager.status.startswith("Answering on ")
        eventually(lambda: gpu.limit == 450_000, f"the fixed cap stands: {capper.said}")
        assert capper.row(gpu.key).holder == "job"  # and the lease of before does
        client.close()
        assert capper.end() == 0
        assert gpu.limit == 450_000  # the fixed cap outlives its capper
        assert restore(capper).returncode == 0
        assert gpu.limit == ORIGINAL


@pytest.mark.exhaustive
def test_agent_reports_a_missing_capper_and_finds_a_later_one(
    tmp_path: Path, manager: ServiceManager
) -> None:
    with Running(
        tmp_path,
        emulate="one-socket-h100",
        environ=manager.environ,
        autotune__mode="apply",
        caps__capper="false",
    ) as agent:
        manager.hears("READY=1")
        manager.reads(lambda told: "missing: capper" in told, "that the capper is missing")
        eventually(lambda: "No capper answers on" in agent.said, "the log says so")
        assert agent.process.poll() is None
        engine = next(
            Path(word)
            for pid in _children(agent.process.pid)
            for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "wattspan-emulated-" in word
        )
        host = _Host(engine)
        with CapperProcess(host, tmp_path, sockets=agent.run_dir):  # type: ignore[arg-type]
            manager.reads(lambda told: "missing" not in told, "that nothing is missing")
        manager.reads(lambda told: "missing: capper" in told, "that it is missing again")
        assert agent.end() == 0


class _Host:
    """An emulated host that somebody else has started."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
