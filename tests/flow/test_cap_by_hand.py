"""The capper as an operator uses it without a tuner: on an emulated host, by configuration."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed.fixtures import entered
from testbed.program import ENVIRONMENT, PROGRAM, wattspan
from testbed.requirements import ROOT
from testbed.waiting import eventually

from wattspan.capper.host_directory import SOCKET_FILE
from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.emulation.host import EmulatedHost, profile_named
from wattspan.model import Knob
from wattspan.ports import CapsError

pytestmark = pytest.mark.exhaustive

GUIDE = (ROOT / "docs/how-to/cap-by-hand.md").read_text(encoding="utf-8")
W = 1000


host = entered(lambda: EmulatedHost(profile_named("two-socket-h100")), "module")


class Operator:
    """An operator who writes the configuration and checks its effect."""

    def __init__(self, host: EmulatedHost, folder: Path, config: str) -> None:
        self._host = host
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-", ignore_cleanup_errors=True)
        places = f'[agent]\nstate_dir = "{folder}/state"\nrun_dir = "{self._sockets.name}"\n'
        self.config = folder / "config.toml"
        self.config.write_text(places + config)
        self.log = folder / "log"
        socket = Path(self._sockets.name) / SOCKET_FILE
        self._client = CapperClient(socket, SystemClock(), who="an operator")
        with self.log.open("wb") as log:
            self.capper = subprocess.Popen(
                [*PROGRAM, "capper", "--config", str(self.config), "--emulated",
                 str(host.directory)],
                env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def limits(self) -> dict[str, int]:
        """The higher of the requested and the enforced value of every power limit; {}
        without a response."""
        assert self.capper.poll() is None, self.log.read_text()
        try:
            rows = self._client.rows()
        except CapsError:
            return {}
        states = [row.state for row in rows if row.state.key.knob is not Knob.GPU_CLOCK]
        return {s.key.device: max(s.requested or 0, s.enforced or 0) for s in states}

    def sees(self, good: Callable[[dict[str, int]], bool], what: str) -> dict[str, int]:
        def seen() -> dict[str, int]:
            limits = self.limits()
            return limits if limits and good(limits) else {}

        return eventually(seen, what)

    def restore(self) -> None:
        """Run `wattspan caps restore` where no capper runs any more."""
        words = ("--config", str(self.config), "--emulated", str(self._host.directory))
        answer = wattspan("caps", "restore", *words)
        assert answer.returncode == 0, answer.stderr

    def close(self) -> None:
        self._client.close()
        self.capper.kill()
        self.capper.wait()
        self._sockets.cleanup()


@pytest.fixture
def operator(host: EmulatedHost, tmp_path: Path) -> Iterator[Callable[[str], Operator]]:
    started: list[Operator] = []

    def start(config: str) -> Operator:
        started.append(Operator(host, tmp_path, config))
        return started[-1]

    yield start
    for one in started:
        one.close()


def originals(host: EmulatedHost) -> dict[str, int]:
    nvml = host.nvml()
    nvml.nvmlInit()
    limits = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        limits[f"gpu:{nvml.nvmlDeviceGetUUID(handle)}"] = nvml.nvmlDeviceGetPowerManagementLimit(
            handle
        )
    nvml.nvmlShutdown()
    for zone in sorted((host.sysfs / "class/powercap").glob("intel-rapl:?")):
        name = (zone / "name").read_text().strip()
        if name.startswith("package"):
            microwatts = (zone / "constraint_0_power_limit_uw").read_text()
            limits[f"rapl:{name}"] = int(microwatts) // 1000
    return limits


def test_guide_examples_are_valid_configurations(tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    configs = [block for block in blocks if "caps" in tomllib.loads(block)]
    assert len(configs) == 3
    for config in configs:
        path = tmp_path / "config.toml"
        path.write_text(config)
        answer = wattspan("config", "check", "--config", str(path))
        assert answer.returncode == 0, answer.stderr


def test_budget_survives_its_capper_until_restored(
    host: EmulatedHost, operator: Callable[[str], Operator], tmp_path: Path
) -> None:
    before = originals(host)
    ceiling = tmp_path / "ceiling.toml"
    total = sum(before.values())
    budget = total * 3 // 4 // W
    hands = operator(
        f'[caps]\nbudget_watts = {budget}\nreserve_watts = 100\nbudget_file = "{ceiling}"\n'
        '[[caps.priority]]\ndevice = "0"\npriority = 200\n'
    )
    most = (budget - 100) * W
    limits = hands.sees(lambda now: sum(now.values()) <= most, "the budget is kept")
    assert limits.keys() == before.keys()
    first, *others = sorted(key for key in before if key.startswith("gpu:"))
    assert limits[first] == before[first]  # higher priority
    assert all(limits[key] < before[key] for key in others)

    draft = ceiling.with_name("draft")
    draft.write_text(f"watts = {(most // W) - 150}\n")
    draft.rename(ceiling)
    hands.sees(lambda now: sum(now.values()) <= most - 250 * W, "the lower ceiling is kept")
    ceiling.unlink()
    assert sum(hands.limits().values()) <= most - 250 * W, "its writer is lost, and it stays"

    hands.capper.send_signal(signal.SIGTERM)
    assert hands.capper.wait(30) == 0, hands.log.read_text()
    assert sum(originals(host).values()) <= most - 250 * W, "an imposed budget outlives its capper"
    hands.restore()
    assert originals(host) == before


def test_budget_that_cannot_be_had_leaves_every_device_its_minimum(
    host: EmulatedHost, operator: Callable[[str], Operator]
) -> None:
    before = originals(host)
    hands = operator("[caps]\nbudget_watts = 1\nlargest_step = 1.0\n")
    hands.sees(
        lambda now: all(
            limit == (200 * W if key.startswith("gpu:") else -(-before[key] // (4 * W)) * W)
            for key, limit in now.items()
        ),
        "boards have their minimums, and packages a quarter",
    )
    hands.capper.send_signal(signal.SIGTERM)
    assert hands.capper.wait(30) == 0
    hands.restore()
    assert originals(host) == before


def test_fixed_limit_is_held_until_restored(
    host: EmulatedHost, operator: Callable[[str], Operator]
) -> None:
    before = originals(host)
    package = next(key for key in before if key.startswith("rapl:"))
    hands = operator(
        '[[caps.fixed]]\ndevice = "*"\nwatts = 450\n'
        '[[caps.fixed]]\ndevice = "intel-rapl:0"\nknob = "cpu_power"\nwatts = 60\n'
    )

    def kept(now: dict[str, int]) -> bool:
        return now[package] == 60 * W and all(
            now[key] == 450 * W for key in now if key.startswith("gpu:")
        )

    hands.sees(kept, "every GPU has 450 W and the package 60 W")
    answer = wattspan("caps", "restore", "--config", str(hands.config))
    assert answer.returncode == 0, answer.stderr
    assert originals(host) == before
