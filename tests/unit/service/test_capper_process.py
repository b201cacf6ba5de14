"""A capper under a service manager: its availability, and changes of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import BOOT, Bench, W
from testbed.capper_server import CapperServer
from testbed.fixtures import entered
from testbed.service_manager import ServiceManager
from testbed.waiting import eventually

from wattspan.capper.ceilings import PowerCeilings
from wattspan.capper.planner import OperatorLimits, imposed_limits
from wattspan.capper.process import needs_restart
from wattspan.capper.protocol import CapperClient, RefusalReason
from wattspan.cli.capper import CapperReload, CapperStatus
from wattspan.config import CapsSettings, Config
from wattspan.model import SECOND, CapKey, CapRow, Knob, Trouble
from wattspan.ports import CapsError, CapTotals, ConfigError
from wattspan.service.capper_process import CapperHealth
from wattspan.service.systemd import SystemdNotifier, Watchdog
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

RULES = OperatorLimits(0.6, 0, 1.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -------------------------------------------------------------------- whether a capper answers


class FakeCaps:
    """A capper that is there or not."""

    totals = CapTotals()

    def __init__(self, refusal: CapsError | None = None) -> None:
        self.refusal = refusal

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        if self.refusal is not None:
            raise self.refusal
        return ()

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        raise NotImplementedError

    def release(self, job: str = "") -> None: ...

    def close(self) -> None: ...


def test_capper_outage_and_recovery_are_detected() -> None:
    caps = FakeCaps(CapsError("No capper answers on /run/c: there is none. Start one."))
    watch = CapperHealth(lambda: caps)
    assert watch.health() == ()  # no request yet
    watch.turn(caps)
    (health,) = watch.health()
    assert (health.source, health.up, health.failures[0].trouble) == (
        "capper",
        False,
        Trouble.ABSENT,
    )
    assert str(health.failures[0]) == (
        "Cannot use the capper: caps are wanted. No capper answers on /run/c: there is none."
        " Start one."
    )
    caps.refusal = None
    watch.turn(caps)
    (health,) = watch.health()
    assert (health.up, health.reads, health.failed, health.failures) == (True, 2, 1, ())


def test_refusing_capper_is_distinguished_from_a_missing_one() -> None:
    caps = FakeCaps(CapsError("User 5 may not ask the capper.", RefusalReason.NOT_ALLOWED))
    watch = CapperHealth(lambda: caps)
    watch.turn(caps)
    assert watch.health()[0].failures[0].trouble is Trouble.DENIED


def test_restoring_capper_is_unavailable() -> None:
    caps = FakeCaps()
    caps.totals = CapTotals(suspended=True)
    watch = CapperHealth(lambda: caps)
    watch.turn(caps)
    (health,) = watch.health()
    assert (health.up, health.failures[0].trouble) == (False, Trouble.DENIED)
    assert str(health.failures[0]).endswith(
        "All limits were restored by `wattspan caps restore`; none is set until the capper "
        "restarts."
    )


# ------------------------------------------------------------------------ another configuration


def test_permitted_leases_survive_a_reload(bench: Bench) -> None:
    bench.hold(500 * W, 0)
    bench.manager.reconfigure(replace(RULES, longest_lease=5 * SECOND, tunable=("gpu0",)))
    bench.turn()
    assert bench.stands == [500 * W, 650 * W]
    assert len(bench.actuator.written) == 1  # no write


def test_reload_with_a_higher_floor_raises_leases(bench: Bench) -> None:
    bench.hold(450 * W, 0)
    bench.manager.reconfigure(replace(RULES, floor_watts=550))
    bench.turn()
    assert bench.stands == [550 * W, 650 * W]


@pytest.mark.parametrize("narrower", [{"tunable": ("gpu1",)}, {"knobs": (Knob.CPU_POWER,)}])
def test_reload_restores_devices_no_longer_tuned(
    bench: Bench, narrower: dict[str, tuple[str, ...]]
) -> None:
    bench.hold(500 * W, 0)
    bench.manager.reconfigure(replace(RULES, **narrower))  # type: ignore[arg-type]
    assert bench.stands == [650 * W, 650 * W]
    with pytest.raises(CapsError, match="not to be tuned"):
        bench.hold(500 * W, 0)


def test_shorter_lease_holds_from_the_next_renewal_on(bench: Bench) -> None:
    bench.hold(500 * W, 0)
    bench.manager.reconfigure(replace(RULES, longest_lease=2 * SECOND))
    bench.manager.renew(1)
    bench.turn(3.0)
    assert bench.stands == [650 * W, 650 * W]


def test_reload_keeps_requested_and_replaces_configured_ceilings(
    bench: Bench, tmp_path: Path
) -> None:
    settings = CapsSettings(budget_watts=1200)
    ceilings = PowerCeilings(settings, tmp_path / "ceilings.json", BOOT, bench.clock)
    ceilings.request(1_000 * W, "a test", 60 * SECOND, PeerCredentials(1, 0))
    ceilings.reconfigure(CapsSettings(budget_watts=900))
    assert ceilings.limit == 900 * W
    ceilings.reconfigure(CapsSettings())
    assert ceilings.limit == 1_000 * W
    imposed = imposed_limits(CapsSettings(), bench.manager.planner(), ceilings.limit)
    assert imposed.limit == 1_000 * W


def test_reload_replaces_the_budget_file(bench: Bench, tmp_path: Path) -> None:
    for name, watts in (("one", 1000), ("two", 800)):
        (tmp_path / name).write_text(f"watts = {watts}\n")
    settings = CapsSettings(budget_file=str(tmp_path / "one"))
    ceilings = PowerCeilings(settings, tmp_path / "ceilings.json", BOOT, bench.clock)
    ceilings.poll()
    assert ceilings.limit == 1000 * W
    ceilings.reconfigure(CapsSettings(budget_file=str(tmp_path / "two")))
    assert ceilings.limit == 1000 * W  # until the other one is read
    ceilings.poll()
    assert ceilings.limit == 800 * W
    ceilings.reconfigure(CapsSettings())
    assert ceilings.limit is None


def refused(client: CapperClient) -> bool:
    try:
        client.rows()
    except CapsError:
        return True
    return False


def test_reload_disconnects_removed_users_and_restores_their_caps(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with CapperServer(bench, tmp_path / "c.sock") as server, closing(server.client()) as client:
        client.hold("job", {bench.key(): 500 * W}, "why")
        assert bench.stands[0] == 500 * W
        server.ask(lambda: server.permit(frozenset({4711})))
        eventually(lambda: refused(client), "it is put out")
        eventually(lambda: bench.stands[0] == 650 * W, "its cap is given back")


def test_only_places_and_new_kinds_of_knobs_need_a_restart() -> None:
    old = Config()
    caps = msgspec.structs.replace(old.caps, users=("a",), floor_watts=3, budget_watts=9)
    assert needs_restart(old, replace(old, caps=caps)) == ()
    agent = msgspec.structs.replace(old.agent, state_dir="/elsewhere", history=5 * SECOND)
    assert needs_restart(old, replace(old, agent=agent)) == ("agent.state_dir",)
    moved = msgspec.structs.replace(old.caps, host_dir="/elsewhere")
    assert needs_restart(old, replace(old, caps=moved)) == ("caps.host_dir",)
    tuned = msgspec.structs.replace(old.autotune, knobs=(Knob.GPU_CLOCK,))
    assert needs_restart(old, replace(old, autotune=tuned)) == ("autotune.knobs",)
    assert needs_restart(replace(old, autotune=tuned), old) == ()


# ----------------------------------------------------------------------- reload


manager = entered(lambda: ServiceManager(watchdog=4))


def test_capper_notifies_readiness_and_watchdog(
    manager: ServiceManager,
) -> None:
    clock, said = ManualClock(), ["One."]
    notify = SystemdNotifier(manager.environ)
    turned = CapperStatus(notify, Watchdog(notify, clock), lambda: said[-1])
    assert manager.messages == []
    for _ in range(4):
        turned()
        clock.advance(1)
    said.append("Two.")
    turned()
    assert manager.messages[0] == "READY=1\nSTATUS=One."
    assert manager.count("WATCHDOG=1") == 5
    assert manager.count("READY=1") == 1
    assert manager.messages[-1] == "STATUS=Two."


def test_invalid_reload_changes_nothing_and_a_valid_one_clears_the_error(
    manager: ServiceManager,
) -> None:
    clock, told, kept = ManualClock(), list[str](), list[Config]()
    notify = SystemdNotifier(manager.environ)
    turned = CapperStatus(notify, Watchdog(notify, clock), lambda: "Fine.")
    faults = ["one: wrong.\ntwo: wrong as well."]

    def load() -> Config:
        if faults:
            raise ConfigError(faults.pop())
        return Config()

    reloading = CapperReload(Config(), load, kept.append, turned, told.append, told.append, clock)
    reloading()
    assert kept == []
    assert told[:2] == ["Not reloaded: one: wrong.", "Not reloaded: two: wrong as well."]
    assert manager.status == "Not reloaded: one: wrong. Fine."
    reloading()
    assert len(kept) == 1
    assert manager.status == "Fine."
    assert (manager.count("RELOADING=1"), manager.count("READY=1")) == (2, 2)
