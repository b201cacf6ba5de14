"""Ceilings: writers, precedence, lifetime, and the resulting limit of each device."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.capper_bench import Bench, W

from wattspan.capper import protocol
from wattspan.capper.audit import AuditEvent
from wattspan.capper.ceilings import MAX_OWNERS, MAX_TTL, PowerCeilings
from wattspan.capper.planner import OperatorLimits, imposed_limits, power_range, unmatched_settings
from wattspan.capper.protocol import RefusalReason, RefusedReply, StateReply
from wattspan.config import CapsSettings
from wattspan.config.tables import FixedCapSettings, PrioritySettings
from wattspan.model import SECOND, CapKey, Knob, KnobState, Trouble
from wattspan.ports import CapsError
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

ROOT, AGENT, POWER_MANAGER = (
    PeerCredentials(10, 0),
    PeerCredentials(20, 1000),
    PeerCredentials(30, 2000),
)
HOUR = 3600 * SECOND
FIXED = (FixedCapSettings(device="*", watts=450),)


def ceilings(
    folder: Path, clock: ManualClock, boot: str = "boot", **settings: object
) -> PowerCeilings:
    caps = CapsSettings(ceiling_users=("2000", "3000"), **settings)  # type: ignore[arg-type]
    return PowerCeilings(caps, folder / "ceilings.json", boot, clock)


def test_lowest_of_all_ceilings_holds(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    told = ceilings(
        tmp_path, ManualClock(), budget_watts=1500, reserve_watts=100, budget_file=str(written)
    )
    told.poll()
    assert told.limit == 900 * W
    told.request(800 * W, "why", HOUR, POWER_MANAGER)
    assert told.limit == 800 * W
    told.request(None, "", None, POWER_MANAGER)
    assert told.limit == 900 * W


def test_ceiling_is_absent_without_configuration(tmp_path: Path) -> None:
    assert ceilings(tmp_path, ManualClock()).limit is None


def test_ceiling_falls_back_to_the_configured_one_when_its_time_is_up(tmp_path: Path) -> None:
    clock = ManualClock()
    told = ceilings(tmp_path, clock, budget_watts=1500)
    told.request(800 * W, "why", 60 * SECOND, POWER_MANAGER)
    clock.advance(59)
    told.poll()
    assert told.limit == 800 * W
    clock.advance(1)
    told.poll()
    assert told.limit == 1500 * W


def test_ceiling_and_its_lifetime_survive_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    ceilings(tmp_path, clock).request(800 * W, "why", 60 * SECOND, POWER_MANAGER)
    clock.advance(30)
    clock.step_wall(10_000)  # within a boot the wall clock is not used
    restarted = ceilings(tmp_path, clock)
    restarted.poll()
    assert restarted.limit == 800 * W
    clock.advance(30)
    restarted.poll()
    assert restarted.limit is None


def test_ceiling_outlives_a_reboot(tmp_path: Path) -> None:
    before = ManualClock(mono=10**15)
    ceilings(tmp_path, before).request(800 * W, "why", 600 * SECOND, POWER_MANAGER)
    after = ManualClock(mono=10**9, wall=before.now().wall + 300 * SECOND)
    booted = ceilings(tmp_path, after, boot="another")
    booted.poll()
    assert booted.limit == 800 * W
    after.advance(300)
    booted.poll()
    assert booted.limit is None


def test_wall_clock_set_back_over_a_reboot_does_not_extend_a_ceiling(tmp_path: Path) -> None:
    before = ManualClock(mono=10**15)
    ceilings(tmp_path, before).request(800 * W, "why", HOUR, POWER_MANAGER)
    after = ManualClock(mono=10**9, wall=before.now().wall - 1000 * MAX_TTL)
    booted = ceilings(tmp_path, after, boot="another")
    after.advance(MAX_TTL / SECOND)
    booted.poll()
    assert booted.limit is None


def refusal(told: PowerCeilings, limit: int | None, ttl: int | None, peer: PeerCredentials) -> str:
    with pytest.raises(CapsError) as refused:
        told.request(limit, "", ttl, peer)
    return refused.value.refusal


def test_only_root_and_ceiling_users_set_or_lift_a_ceiling(tmp_path: Path) -> None:
    told = ceilings(tmp_path, ManualClock(), users=("1000",))
    told.request(800 * W, "why", HOUR, ROOT)
    for limit, ttl in ((1, HOUR), (1, None), (None, None)):
        for peer in (AGENT, PeerCredentials(40, None)):
            assert refusal(told, limit, ttl, peer) == RefusalReason.NOT_ALLOWED
    assert told.limit == 800 * W
    told.request(700 * W, "why", HOUR, POWER_MANAGER)
    assert told.limit == 700 * W


def test_each_owner_sets_raises_and_lifts_its_own_ceiling_only(tmp_path: Path) -> None:
    told = ceilings(tmp_path, ManualClock())
    told.request(800 * W, "root's", HOUR, ROOT)
    told.request(500 * W, "lower", HOUR, POWER_MANAGER)
    assert told.limit == 500 * W
    told.request(900 * W, "higher", HOUR, POWER_MANAGER)
    assert told.limit == 800 * W
    told.request(None, "", None, ROOT)
    assert told.limit == 900 * W
    assert [(row.uid, row.limit, row.why) for row in told.rows] == [(2000, 900 * W, "higher")]
    stored = json.loads((tmp_path / "ceilings.json").read_bytes())
    assert [(one["uid"], one["limit"]) for one in stored["requested"]] == [(2000, 900 * W)]


def test_number_of_owners_is_bounded_and_root_always_has_a_place(tmp_path: Path) -> None:
    users = tuple(str(uid) for uid in range(3000, 3000 + MAX_OWNERS + 1))
    clock = ManualClock()
    told = PowerCeilings(
        CapsSettings(ceiling_users=users), tmp_path / "ceilings.json", "boot", clock
    )
    for uid in users[:MAX_OWNERS]:
        told.request(900 * W, "", HOUR, PeerCredentials(1, int(uid)))
    assert (
        refusal(told, 800 * W, HOUR, PeerCredentials(1, int(users[-1])))
        == RefusalReason.NOT_ALLOWED
    )
    told.request(850 * W, "", HOUR, PeerCredentials(1, 3000))
    told.request(800 * W, "", HOUR, ROOT)
    assert told.limit == 800 * W


def test_owner_that_is_not_configured_any_more_loses_its_ceiling(tmp_path: Path) -> None:
    told = ceilings(tmp_path, ManualClock())
    told.request(500 * W, "", HOUR, POWER_MANAGER)
    told.request(800 * W, "", HOUR, ROOT)
    told.reconfigure(CapsSettings())
    assert told.limit == 800 * W
    assert b"2000" not in (tmp_path / "ceilings.json").read_bytes()


@pytest.mark.parametrize(
    ("limit", "ttl"),
    [(0, HOUR), (-5, HOUR), (800, 0), (800, None), (800, MAX_TTL + 1)],
)
def test_ceiling_without_a_limit_or_a_bounded_time_is_refused(
    tmp_path: Path, limit: int, ttl: int | None
) -> None:
    assert refusal(ceilings(tmp_path, ManualClock()), limit, ttl, ROOT) == RefusalReason.MALFORMED


@pytest.mark.parametrize("text", ["{", '{"version":3}', '{"version":2,"requested":3}', "[]"])
def test_file_of_ceilings_that_cannot_be_read_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "ceilings.json").write_text(text)
    told = ceilings(tmp_path, ManualClock())
    assert told.limit is None
    assert "are invalid" in told.trouble


def stored_by_an_earlier_version(folder: Path, uid: int, **fields: object) -> None:
    requested = {"limit": 800 * W, "why": "x", "uid": uid, "boot_id": "boot", **fields}
    (folder / "ceilings.json").write_text(json.dumps({"requested": requested}))


def test_ceiling_of_root_from_an_earlier_version_gets_a_bounded_time(tmp_path: Path) -> None:
    stored_by_an_earlier_version(tmp_path, 0)
    clock = ManualClock()
    told = ceilings(tmp_path, clock)
    assert told.limit == 800 * W
    clock.advance(MAX_TTL / SECOND)
    told.poll()
    assert told.limit is None


def test_ceiling_of_another_user_from_an_earlier_version_is_dropped(tmp_path: Path) -> None:
    stored_by_an_earlier_version(tmp_path, 1000)
    events: list[AuditEvent] = []
    path = tmp_path / "ceilings.json"
    told = PowerCeilings(CapsSettings(), path, "boot", ManualClock(), record=events.append)
    assert told.limit is None
    assert [(e.deed, e.uid, e.old) for e in events] == [("lift", 1000, 800 * W)]
    assert "1000" not in path.read_text()


def test_lost_file_leaves_its_ceiling_over_a_restart(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    clock = ManualClock()
    ceilings(tmp_path, clock, budget_file=str(written)).poll()
    written.unlink()
    restarted = ceilings(tmp_path, clock, budget_file=str(written))
    restarted.poll()
    assert restarted.limit == 1000 * W
    assert "stays in force" in restarted.trouble


# ------------------------------------------------------------------------------ audit and status


def test_names_of_users_are_not_looked_up_at_each_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    held = ceilings(tmp_path, ManualClock(), budget_file=str(written))
    monkeypatch.setattr("wattspan.capper.ceilings.uids_of", pytest.fail)
    held.poll()
    held.poll()
    assert held.requested == 1000 * W


@pytest.mark.needs_root
def test_owners_of_the_file_follow_the_configuration(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    os.chown(written, 2000, 2000)
    held = ceilings(tmp_path, ManualClock())
    held.reconfigure(CapsSettings(budget_file=str(written)))
    held.poll()
    assert "user 2000 owns it" in held.trouble
    held.reconfigure(CapsSettings(budget_file=str(written), ceiling_users=("2000",)))
    held.poll()
    assert (held.trouble, held.requested) == ("", 1000 * W)


class Asked:
    """A ceiling table over two boards, and its audit rows."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.bench = Bench(folder)
        caps = CapsSettings(ceiling_users=("2000",), **settings)  # type: ignore[arg-type]
        self.desk = self.bench.desk(caps)

    def ask(
        self, peer: PeerCredentials, request: protocol.CapperRequest
    ) -> StateReply | RefusedReply:
        return self.desk.answer(1, peer, request)

    def turn(self, seconds: float = 1.0) -> None:
        self.bench.clock.advance(seconds)
        self.desk.turn()

    def events(self, *deeds: str) -> list[tuple[object, ...]]:
        return [
            (e.deed, e.uid, e.pid, e.old, e.new, e.ttl, e.why)
            for e in self.bench.events
            if e.deed in deeds
        ]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_setting_lifting_and_lapsing_are_on_record_with_uid_pid_limit_and_time(
    asked: Asked,
) -> None:
    asked.ask(POWER_MANAGER, protocol.CeilingRequest(900 * W, "grid event", HOUR))
    asked.ask(POWER_MANAGER, protocol.CeilingRequest(850 * W, "more", 60 * SECOND))
    asked.turn(61)
    asked.ask(ROOT, protocol.CeilingRequest(1000 * W, "mine", HOUR))
    asked.ask(ROOT, protocol.CeilingRequest(None, "over"))
    asked.ask(AGENT, protocol.CeilingRequest(1, "attack", HOUR))
    assert asked.events("ceiling", "lift", "lapse") == [
        ("ceiling", 2000, 30, None, 900 * W, HOUR, "grid event"),
        ("ceiling", 2000, 30, 900 * W, 850 * W, 60 * SECOND, "more"),
        ("lapse", 2000, None, 850 * W, None, None, "its time is up"),
        ("ceiling", 0, 10, None, 1000 * W, HOUR, "mine"),
        ("lift", 0, 10, 1000 * W, None, None, "over"),
    ]
    ((_, uid, pid, *_, why),) = asked.events("refuse")
    assert (uid, pid) == (1000, 20)
    assert "ceiling_users" in str(why)


def test_ceiling_of_one_milliwatt_leaves_every_device_at_its_floor(asked: Asked) -> None:
    asked.ask(POWER_MANAGER, protocol.CeilingRequest(1, "attack", HOUR))
    for _ in range(20):
        asked.turn()
    assert asked.bench.stands == [420 * W, 420 * W]
    told = asked.desk.state()
    assert told.ceiling == 1
    assert told.short == 2 * 420 * W - 1
    assert "cannot be kept" in asked.desk.trouble


def test_only_configured_ceilings_go_below_the_tuner_floor(tmp_path: Path) -> None:
    asked = Asked(
        tmp_path, budget_watts=700, priority=(PrioritySettings(device="1", priority=200),)
    )
    for _ in range(9):
        asked.turn()
    assert asked.bench.stands == [200 * W, 500 * W]
    asked.ask(ROOT, protocol.CeilingRequest(650 * W, "", HOUR))
    for _ in range(9):
        asked.turn()
    assert asked.bench.stands == [200 * W, 450 * W]
    asked.ask(ROOT, protocol.CeilingRequest(1, "", HOUR))
    for _ in range(9):
        asked.turn()
    assert asked.bench.stands == [200 * W, 420 * W]


def test_device_is_raised_to_its_floor_while_a_ceiling_cannot_be_kept(tmp_path: Path) -> None:
    asked = Asked(tmp_path, budget_watts=500)
    asked.turn()
    assert asked.bench.stands == [250 * W, 250 * W]
    asked.ask(ROOT, protocol.CeilingRequest(1, "", HOUR))
    asked.desk.ceilings.reconfigure(CapsSettings())
    for _ in range(9):
        asked.turn()
    assert asked.bench.stands == [420 * W, 420 * W]


def test_absolute_floor_holds_for_a_ceiling_as_well(tmp_path: Path) -> None:
    asked = Asked(tmp_path, floor_watts=500)
    asked.ask(ROOT, protocol.CeilingRequest(1, "", HOUR))
    asked.turn()
    assert asked.bench.stands == [500 * W, 500 * W]


def test_state_lists_each_ceiling_with_owner_limit_and_end(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text('watts = 1100\nwhy = "grid"\n')
    asked = Asked(tmp_path, budget_watts=1200, reserve_watts=100, budget_file=str(written))
    asked.turn()
    asked.ask(POWER_MANAGER, protocol.CeilingRequest(900 * W, "fleet", HOUR))
    expires = asked.bench.clock.monotonic() + HOUR
    rows = [(c.source, c.limit, c.why, c.expires) for c in asked.desk.state().ceilings]
    assert rows == [
        ("configuration", 1100 * W, "", None),
        ("file", 1000 * W, "grid", None),
        ("socket", 900 * W, "fleet", expires),
    ]
    assert asked.desk.state().ceilings[-1].uid == 2000


def test_restore_lifts_requested_ceilings_and_audits_it(asked: Asked, tmp_path: Path) -> None:
    asked.ask(POWER_MANAGER, protocol.CeilingRequest(900 * W, "grid", HOUR))
    asked.turn()
    asked.ask(ROOT, protocol.RestoreRequest())
    assert asked.bench.stands == [650 * W, 650 * W]
    assert asked.events("lift") == [
        ("lift", 2000, 10, 900 * W, None, None, "user 0 asked for everything to be restored")
    ]
    assert ceilings(tmp_path, asked.bench.clock).limit is None


@pytest.mark.parametrize(
    "request_",
    [protocol.CeilingRequest(1, "x", HOUR), protocol.RestoreRequest(), protocol.AcceptRequest()],
)
def test_every_refused_command_of_a_connection_is_on_record(
    asked: Asked, request_: protocol.CapperRequest
) -> None:
    for _ in range(3):
        asked.ask(AGENT, request_)
    assert [row[1:3] for row in asked.events("refuse")] == [(1000, 20)] * 3


@pytest.mark.parametrize(
    ("request_", "word"),
    [(protocol.RestoreRequest(), "restore"), (protocol.AcceptRequest(), "accept")],
)
def test_restore_and_accept_are_audited_with_their_peer_and_outcome(
    asked: Asked, request_: protocol.CapperRequest, word: str
) -> None:
    asked.bench.hold(500 * W, 0)
    asked.ask(AGENT, request_)
    asked.bench.board(0).locked = True
    asked.ask(ROOT, request_)
    asked.bench.board(0).locked = False
    asked.bench.clock.advance(100)
    asked.ask(ROOT, request_)
    peers = [(deed, uid, pid) for deed, uid, pid, *_ in asked.events("command", "refuse")]
    failed = [("refuse", 0, 10)] if word == "restore" else []
    assert peers == [("refuse", 1000, 20), ("command", 0, 10), *failed, ("command", 0, 10)]
    assert all(str(row[-1]).startswith(word) for row in asked.events("command"))


# --------------------------------------------------------------------------- resulting limits


def test_fixed_cap_is_named_by_id_index_or_star(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for device, meant in (("gpu1", [1]), ("0", [0]), ("*", [0, 1]), ("gpu7", [])):
        settings = CapsSettings(fixed=(FixedCapSettings(device=device, watts=500),))
        fixed = imposed_limits(settings, bench.manager.planner(), None).fixed
        assert fixed == {bench.key(n): 500 * W for n in meant}


def test_fixed_cap_applies_to_its_actuator_only(tmp_path: Path) -> None:
    settings = CapsSettings(fixed=(FixedCapSettings(device="*", watts=100, knob=Knob.CPU_POWER),))
    assert imposed_limits(settings, Bench(tmp_path).manager.planner(), None).fixed == {}


def test_shares_keep_the_limit_and_go_by_priority(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    settings = CapsSettings(priority=(PrioritySettings(device="1", priority=200),))
    shares = imposed_limits(settings, bench.manager.planner(), 900 * W).shares
    assert shares == {bench.key(0): 250 * W, bench.key(1): 650 * W}


def test_share_of_a_device_without_a_limit_is_by_its_specification(tmp_path: Path) -> None:
    """A package of 125 W, for which the firmware has written 4095 W."""
    bench = Bench(tmp_path)
    board = bench.board(1)
    board.minimum, board.default, board.maximum, board.stands = 50 * W, 125 * W, 4095 * W, 4095 * W
    bench.start()
    shares = imposed_limits(CapsSettings(), bench.manager.planner(), 900 * W).shares
    assert shares == {bench.key(0): 525 * W, bench.key(1): 375 * W}


def test_externally_set_device_counts_with_its_limit(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold(500 * W, 0)
    bench.board(0).stands = 640 * W
    bench.turn(1)
    shares = imposed_limits(CapsSettings(), bench.manager.planner(), 900 * W).shares
    assert shares == {bench.key(1): 260 * W}


def test_ceiling_below_the_sum_of_minimums_is_reported(tmp_path: Path) -> None:
    imposed = imposed_limits(CapsSettings(), Bench(tmp_path).manager.planner(), 300 * W)
    assert imposed.short == 100 * W
    assert set(imposed.shares.values()) == {200 * W}


@pytest.mark.parametrize("settings", [{"budget_watts": 900}, {"fixed": FIXED}])
@pytest.mark.parametrize(
    ("fault", "value"), [("locked", True), ("inert", True), ("fault", Trouble.RETRY)]
)
def test_imposed_limit_that_failed_is_told_and_tried_until_it_is_in_force(
    fault: str, value: object, settings: dict[str, Any], tmp_path: Path
) -> None:
    bench = Bench(tmp_path)
    desk = bench.desk(CapsSettings(**settings))
    bench.manager.find_devices()
    healthy = getattr(bench.board(), fault)
    setattr(bench.board(), fault, value)
    said = set()
    for _ in range(60):
        bench.clock.advance(7)
        desk.turn()
        said.add(bench.manager.refused)
    assert [len(sentences) for sentences in said] == [1]  # also between two attempts
    setattr(bench.board(), fault, healthy)
    for _ in range(600):
        bench.clock.advance(7)
        desk.turn()
    assert bench.stands == [450 * W, 450 * W]
    assert bench.manager.refused == frozenset()


def test_limit_that_firmware_raises_is_told_and_given_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    board = bench.board()
    bench.actuator.after = lambda key: setattr(board, "stands", max(board.stands, 480 * W))
    desk = bench.desk(CapsSettings(fixed=FIXED))
    for _ in range(3):
        bench.clock.advance(1)
        desk.turn()
    assert (bench.stands, len(bench.actuator.written)) == ([480 * W, 450 * W], 2)
    assert [sentence.count("sets GPU0 to 480 W") for sentence in desk.unmatched] == [1]
    bench.start()  # after a kill
    assert bench.manager.restore() == ()
    assert bench.stands == [650 * W, 650 * W]


def test_limit_that_is_not_shown_is_unknown_and_not_zero(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    settings = CapsSettings(budget_watts=1000)
    desk = bench.desk(settings)
    desk.turn()
    assert bench.stands == [500 * W, 500 * W]
    assert power_range(settings, bench.manager.planner()).enforced == 1000 * W
    bench.board().stands = None  # type: ignore[assignment]
    bench.clock.advance(60)
    desk.turn()
    planner = bench.manager.planner()
    assert power_range(settings, planner).enforced is None
    assert not planner.fits(bench.key(1), 600 * W)


def test_device_that_never_had_a_limit_takes_no_part(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.board().stands = None  # type: ignore[assignment]
    settings = CapsSettings(fixed=FIXED, budget_watts=900)
    desk = bench.desk(settings)
    desk.turn()
    planner = bench.manager.planner()
    imposed = planner.demand.imposed
    assert imposed.fixed.keys() == imposed.shares.keys() == {bench.key(1)}
    assert power_range(settings, planner).enforced == 450 * W
    assert [sentence.count("does not limit GPU0") for sentence in desk.unmatched] == [1]


BOARD = KnobState(CapKey(Knob.GPU_POWER, "gpu0"), "GPU0", 200 * W, 700 * W, 700 * W, 700 * W)
PACKAGE = KnobState(CapKey(Knob.CPU_POWER, "rapl:0"), "PACKAGE0", None, *[205 * W] * 4)
UNSET = replace(PACKAGE, name="UNSET", requested=None)
NO_RANGE = KnobState(UNSET.key, "NO RANGE")


@pytest.mark.parametrize(
    ("knob", "watts", "states", "said"),
    [
        (Knob.GPU_POWER, 50, [BOARD], ["sets GPU0 to 200 W instead of 50 W"]),
        (Knob.GPU_POWER, 200, [BOARD], []),
        (Knob.CPU_POWER, 60, [PACKAGE], ["sets PACKAGE0 to 100 W instead of 60 W"]),
        (Knob.CPU_POWER, 100, [PACKAGE, UNSET], ["does not limit UNSET"]),
        (Knob.CPU_POWER, 100, [replace(PACKAGE, enforced=None)], ["counts PACKAGE0 with 205 W"]),
        (
            Knob.CPU_POWER,
            100,
            [UNSET, NO_RANGE],
            ["does not limit UNSET", "does not limit NO RANGE", "budget_watts limits nothing"],
        ),
    ],
)
def test_limit_without_its_effect_is_told(
    knob: Knob, watts: int, states: list[KnobState], said: list[str]
) -> None:
    fixed = (FixedCapSettings(device="*", watts=watts, knob=knob),)
    caps = CapsSettings(fixed=fixed, budget_watts=900, floor_watts=100)
    told = list(unmatched_settings(caps, states))
    assert len(told) == len(said)
    assert all(part in sentence for part, sentence in zip(said, told, strict=True))


def test_budget_holds_and_originals_are_restored(tmp_path: Path) -> None:
    bench = Bench(tmp_path, boards=4, limits=OperatorLimits(0.6, 0, 0.25))
    for limit in (2000, 1200, 900, 2400):
        for _ in range(5):
            before = sum(bench.stands)
            bench.manager.impose(imposed_limits(CapsSettings(), bench.manager.planner(), limit * W))
            bench.turn(1)
            assert sum(bench.stands) <= max(before, limit * W)
        assert sum(bench.stands) <= limit * W
    bench.manager.impose(imposed_limits(CapsSettings(), bench.manager.planner(), None))
    bench.turn(1)
    assert bench.stands == [650 * W] * 4
