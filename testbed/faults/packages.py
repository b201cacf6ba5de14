"""Packages that are upgraded and removed with a power limit in force, on a booted Debian."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from testbed.debian_machine import CPU_MAY_BE_CAPPED, Machine
from testbed.debian_root import another_version, the_package
from testbed.faults.observation import NANO
from testbed.faults.schedule import Claim, Fault
from testbed.faults.stage import Stage, Watcher
from testbed.network import enter_network

METRICS = "http://127.0.0.1:9949/metrics"
AGENT = "wattspan.service"


class PackageStage(Stage):
    """A machine with the package, whose units are started by its systemd. Needs debootstrap."""

    def __init__(self) -> None:
        self.settings, self.wall_offset, self.asleep = {}, 0.0, 0.0
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wattspan-packages-"))
            self.newer = another_version(the_package(), "9.0", Path(folder))
            self.machine = stack.enter_context(Machine())
            self.machine.install(the_package())
            self.machine.configure(CPU_MAY_BE_CAPPED)
            self.machine.host.systemctl("restart", AGENT)
            self.machine.measuring()
            self.host = self.machine.emulated  # type: ignore[assignment]
            self._inside = False
            self.watcher = Watcher(self.address, 0.1)
            stack.callback(self.watcher.close)
            self.until(lambda: self.watcher.last, "the first scrape", 30)
            self.watcher.start_judging()
            self._stack = stack.pop_all()

    def address(self) -> str:
        """The address inside the machine, whose network the thread that asks has from then on."""
        if not self._inside:
            enter_network(Path(f"/proc/{self.machine.host.pid}/ns/net"))
            self._inside = True
        return METRICS

    @property
    def lives(self) -> str:
        return self.machine.host.journal()

    @property
    def alive(self) -> bool:
        return self.machine.active(AGENT)

    def close(self) -> None:
        self._stack.close()


def of(stage: Stage) -> PackageStage:
    assert isinstance(stage, PackageStage)
    return stage


def _with_a_cap(
    name: str,
    act: Callable[[PackageStage], object],
    end: Callable[[PackageStage], object],
    means: str,
) -> Fault:
    """``act`` runs with a cap in force; the original limit must be in force after it."""
    found: dict[str, float] = {}

    def inject(stage: Stage) -> None:
        machine = of(stage).machine
        machine.host.systemctl("stop", "holder.service", check=False)
        machine.host.systemctl("reset-failed", "holder.service", check=False)
        machine.hold_a_cap()
        began = time.monotonic_ns()
        act(of(stage))
        found["took"] = (time.monotonic_ns() - began) / NANO
        found["restored"] = machine.restored()

    return Fault(
        name,
        inject,
        lambda stage: end(of(stage)),
        means,
        claims=[
            Claim("the original limit was in force after it", lambda *_: bool(found["restored"]))
        ],
        lasts=0.1,
        short=0.1,
        missing=100.0,  # no measurement between two agents
        unanswered="the agent is stopped and started",
        how="the installed package on a booted Debian, whose hardware is emulated",
        note=lambda _: f"it took {found['took']:.1f} s",
    )


FAULTS = (
    _with_a_cap(
        "the package is upgraded while a cap is in force",
        lambda stage: stage.machine.install(stage.newer),
        lambda stage: None,
        "The cap is restored first; the new agent continues the totals, and its first reading"
        " covers the time between the two agents if that is short.",
    ),
    _with_a_cap(
        "an older package is installed over it while a cap is in force",
        lambda stage: stage.machine.install(the_package(), "--allow-downgrades"),
        lambda stage: None,
        "As above.",
    ),
    _with_a_cap(
        "the package is removed while a cap is in force, and installed again",
        lambda stage: stage.machine.apt("remove", "wattspan"),
        lambda stage: stage.machine.install(the_package()),
        "The cap is restored first. Configuration and totals stay until a purge.",
    ),
)
