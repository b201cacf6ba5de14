"""The fleet's ceiling: time to live, fallback, storage, and its effect on the devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.capper_bench import Bench, W

from wattspan.capper import protocol
from wattspan.capper.audit import AuditEvent
from wattspan.capper.ceilings import (
    MAX_LIFETIME,
    RETREAT,
    FleetCeiling,
)
from wattspan.capper.journal import JournalError
from wattspan.capper.protocol import AllotmentRow, RefusalReason, RefusedReply, StateReply
from wattspan.config import CapsSettings
from wattspan.model import SECOND
from wattspan.ports import CapsError
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

AGENT, STRANGER = PeerCredentials(20, 1000), PeerCredentials(30, 2000)


class Ceiling:
    """A FleetCeiling on a file; ``restart`` is that of the capper."""

    def __init__(self, folder: Path) -> None:
        self.path, self.clock = folder / "allotment.json", ManualClock()
        self.events: list[AuditEvent] = []
        self.restart()

    def restart(self) -> None:
        self.fleet = FleetCeiling(self.path, self.clock, enabled=True, record=self.events.append)

    def allot(self, limit: int, safe: int, seconds: float = 10) -> None:
        until = self.clock.now().since_boot + round(seconds * SECOND)
        self.fleet.allot(limit * W, safe * W, until, "why", AGENT)

    def after(self, seconds: float) -> int | None:
        self.clock.advance(seconds)
        self.fleet.poll()
        return self.fleet.limit and self.fleet.limit // W


@pytest.fixture
def ceiling(tmp_path: Path) -> Ceiling:
    return Ceiling(tmp_path)


def test_host_without_an_allotment_is_limited_to_its_floors(ceiling: Ceiling) -> None:
    assert ceiling.fleet.limit == 0


def test_allotment_falls_to_the_safe_one_when_its_time_is_up(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    assert ceiling.after(9.9) == 1000
    assert ceiling.after(0.1) == 400
    assert ceiling.fleet.until is None
    assert [event.deed for event in ceiling.events] == ["ceiling", "lapse"]


def test_fallback_never_raises_the_limit(ceiling: Ceiling) -> None:
    ceiling.allot(300, 400)
    assert ceiling.after(10) == 300
    assert ceiling.fleet.safe == 300 * W


def test_suspend_counts_as_time(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    ceiling.clock.suspend(11)
    assert ceiling.after(0) == 400


def test_stepped_wall_clock_changes_nothing(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    ceiling.clock.step_wall(10**6)
    assert ceiling.after(9) == 1000
    ceiling.clock.step_wall(-(10**7))
    assert ceiling.after(1) == 400


def test_restarted_capper_begins_with_the_fallback(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    ceiling.restart()
    assert ceiling.after(0) == 400
    ceiling.allot(300, 400)
    ceiling.restart()
    assert ceiling.after(0) == 300


def test_ceiling_retreats_to_the_floors_after_a_stated_time(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    assert ceiling.after(10) == 400
    assert ceiling.after(RETREAT / SECOND - 1) == 400
    ceiling.allot(0, 0, seconds=0)  # a new session begins
    assert ceiling.after(1) == 0
    assert [event.deed for event in ceiling.events] == ["ceiling", "lapse", "lapse"]
    ceiling.allot(1000, 400)
    assert ceiling.after(1) == 1000


def test_restart_of_the_capper_does_not_delay_the_retreat(ceiling: Ceiling) -> None:
    for _ in range(4 * RETREAT // SECOND // 300):
        ceiling.allot(1000, 400, seconds=310)
        ceiling.after(300)
    ceiling.restart()
    assert ceiling.after(0) == 400
    ceiling.after(RETREAT / SECOND / 2)
    ceiling.restart()
    assert ceiling.after(RETREAT / SECOND / 4) == 400
    assert ceiling.after(RETREAT / SECOND / 4) == 0


def test_restarted_host_begins_with_the_floors(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    boot = FleetCeiling(ceiling.path, ceiling.clock, enabled=True, boot_id="another")
    assert boot.limit == 0
    earlier = FleetCeiling(ceiling.path, ManualClock(mono=SECOND), enabled=True)
    assert earlier.limit == 0


def test_renewal_survives_a_full_disk(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    ceiling.path.with_suffix(".new").mkdir()
    ceiling.clock.advance(RETREAT / SECOND / 2)
    ceiling.allot(1000, 400)
    assert ceiling.after(9) == 1000


def test_late_request_lowers_and_sets_nothing(ceiling: Ceiling) -> None:
    ceiling.allot(1000, 400)
    ceiling.allot(900, 800, seconds=0)
    assert ceiling.after(0) == 400
    ceiling.restart()
    assert ceiling.after(0) == 400


def test_unstorable_allotment_applies_its_lower_values_only(
    ceiling: Ceiling, tmp_path: Path
) -> None:
    ceiling.allot(1000, 400)
    ceiling.path.with_suffix(".new").mkdir()
    with pytest.raises(JournalError, match="Cannot store the allotment"):
        ceiling.allot(700, 600)
    assert ceiling.after(0) == 700
    assert ceiling.after(10) == 400


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"limit":-1,"safe":1}', b"\xff", b"[" * 100_000, b'{"limit":1}']
)
def test_damaged_record_limits_the_host_to_its_floors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "allotment.json").write_bytes(content)
    ceiling = Ceiling(tmp_path)
    assert ceiling.fleet.limit == 0
    assert "floors apply" in ceiling.fleet.trouble
    ceiling.allot(1000, 400)
    assert ceiling.fleet.trouble == ""


def test_invalid_allotment_is_refused(ceiling: Ceiling) -> None:
    for limit, safe, seconds in ((-1, 0, 1), (0, -1, 1), (1, 1, MAX_LIFETIME / SECOND + 1)):
        with pytest.raises(CapsError, match="at least 0"):
            ceiling.allot(limit, safe, seconds)
    ceiling.fleet.enabled = False
    with pytest.raises(CapsError, match=r"\[fleet\] endpoints"):
        ceiling.allot(1, 1)
    assert ceiling.fleet.limit is None


# ---------------------------------------------------------------------------------- the devices


class Host:
    """Two boards of 200 to 650 W and 100 W of other devices, in a fleet."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.bench = Bench(folder)
        caps = CapsSettings(users=("1000",), reserve_watts=100, **settings)
        self.desk = self.bench.desk(caps, in_fleet=True)
        self.fleet = self.desk.ceilings.fleet
        self.desk.turn()

    def allot(
        self, limit: int, safe: int, peer: PeerCredentials = AGENT, seconds: int = 10
    ) -> StateReply | RefusedReply:
        until = self.bench.clock.now().since_boot + seconds * SECOND
        return self.desk.answer(1, peer, protocol.AllotmentRequest(limit * W, safe * W, until))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_devices_are_at_their_floors_before_the_first_allotment(host: Host) -> None:
    assert host.bench.stands == [200 * W, 200 * W]
    assert host.desk.state().allotment == AllotmentRow(
        limit=0, safe=0, until=None, floor=500 * W, original=1400 * W, enforced=500 * W
    )
    assert host.desk.trouble == ""


def test_allotment_divides_among_devices_and_lapses_by_itself(host: Host) -> None:
    reply = host.allot(1000, 600)
    assert isinstance(reply, StateReply)
    assert reply.allotment.enforced == 1000 * W
    assert host.bench.stands == [450 * W, 450 * W]
    assert host.desk.next_expiry == host.bench.clock.monotonic() + 10 * SECOND
    host.bench.clock.advance(10)
    host.desk.turn()
    assert host.bench.stands == [250 * W, 250 * W]


def test_allotment_above_the_originals_restores_them(host: Host) -> None:
    host.allot(5000, 600)
    assert host.bench.stands == [650 * W, 650 * W]


def test_configured_budget_applies_beside_the_allotment(tmp_path: Path) -> None:
    host = Host(tmp_path, budget_watts=800)
    host.allot(1000, 600)
    assert host.bench.stands == [350 * W, 350 * W]
    host.allot(700, 600)
    assert host.bench.stands == [300 * W, 300 * W]


def test_state_counts_a_device_that_cannot_be_lowered(host: Host) -> None:
    host.allot(1400, 600)
    host.bench.board(0).locked = True
    reply = host.allot(700, 600)
    assert isinstance(reply, StateReply)
    assert reply.allotment.enforced == sum(host.bench.stands) + 100 * W > 700 * W
    assert reply.allotment.floor == (650 + 200 + 100) * W


def test_unlisted_user_sets_no_allotment(host: Host) -> None:
    refused = host.allot(1000, 600, STRANGER)
    assert isinstance(refused, RefusedReply)
    assert refused.reason is RefusalReason.NOT_ALLOWED
    assert host.bench.stands == [200 * W, 200 * W]


def test_tuned_device_has_its_share_of_the_allotment_after_the_capper(host: Host) -> None:
    host.allot(1000, 600)
    host.bench.hold(430 * W)
    host.desk.turn()
    assert host.desk.state().allotment.held == {host.bench.key(0).device: (430 * W, 20 * W)}
    host.bench.manager.stop()
    assert host.bench.stands == [450 * W, 450 * W]
