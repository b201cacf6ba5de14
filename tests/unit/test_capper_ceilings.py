"""Ceilings: who may set one, which holds, how long, and what it means for each device."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.capper_bench import Bench, W
from wattspan.capper.bounds import Rules
from wattspan.capper.ceilings import Ceilings, impose
from wattspan.capper.protocol import Refusal
from wattspan.capper.wishes import Peer
from wattspan.config import Caps
from wattspan.config.control import FixedCap, Priority
from wattspan.model import SECOND, Knob
from wattspan.ports import CapsError
from wattspan.testing import ManualClock

ROOT, AGENT = Peer(10, 0), Peer(20, 1000)


def ceilings(folder: Path, clock: ManualClock, boot: str = "boot", **settings: object) -> Ceilings:
    return Ceilings(Caps(**settings), folder / "ceilings.json", boot, clock)  # type: ignore[arg-type]


def test_the_lowest_of_all_ceilings_holds(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    told = ceilings(
        tmp_path, ManualClock(), budget_watts=1500, reserve_watts=100, budget_file=str(written)
    )
    told.poll()
    assert told.limit == 900 * W
    told.ask(800 * W, "why", None, AGENT)
    assert told.limit == 800 * W
    told.ask(None, "", None, AGENT)
    assert told.limit == 900 * W


def test_nothing_configured_is_no_ceiling(tmp_path: Path) -> None:
    assert ceilings(tmp_path, ManualClock()).limit is None


def test_a_ceiling_falls_back_to_the_configured_one_when_its_time_is_up(tmp_path: Path) -> None:
    clock = ManualClock()
    told = ceilings(tmp_path, clock, budget_watts=1500)
    told.ask(800 * W, "why", 60 * SECOND, AGENT)
    clock.advance(59)
    told.poll()
    assert told.limit == 800 * W
    clock.advance(1)
    told.poll()
    assert told.limit == 1500 * W


def test_a_restarted_capper_knows_the_ceiling_and_how_long_it_lasts(tmp_path: Path) -> None:
    clock = ManualClock()
    ceilings(tmp_path, clock).ask(800 * W, "why", 60 * SECOND, AGENT)
    clock.advance(30)
    clock.step_wall(10_000)  # within a boot the wall clock means nothing
    restarted = ceilings(tmp_path, clock)
    restarted.poll()
    assert restarted.limit == 800 * W
    clock.advance(30)
    restarted.poll()
    assert restarted.limit is None


def test_a_ceiling_outlives_a_reboot(tmp_path: Path) -> None:
    before = ManualClock(mono=10**15)
    ceilings(tmp_path, before).ask(800 * W, "why", 600 * SECOND, AGENT)
    after = ManualClock(mono=10**9, wall=before.now().wall + 300 * SECOND)
    booted = ceilings(tmp_path, after, boot="another")
    booted.poll()
    assert booted.limit == 800 * W
    after.advance(300)
    booted.poll()
    assert booted.limit is None


def test_what_root_has_set_only_root_lifts_or_raises(tmp_path: Path) -> None:
    told = ceilings(tmp_path, ManualClock())
    told.ask(800 * W, "why", None, ROOT)
    for limit, ttl in ((None, None), (900 * W, None), (700 * W, SECOND)):
        with pytest.raises(CapsError) as refused:
            told.ask(limit, "", ttl, AGENT)
        assert refused.value.refusal == Refusal.NOT_ALLOWED
    told.ask(700 * W, "lower", None, AGENT)
    with pytest.raises(CapsError):  # it is root's still
        told.ask(None, "", None, AGENT)
    told.ask(None, "", None, ROOT)
    assert told.limit is None


@pytest.mark.parametrize(("limit", "ttl"), [(0, None), (-5, None), (800, 0)])
def test_a_ceiling_of_nothing_is_refused(tmp_path: Path, limit: int, ttl: int | None) -> None:
    told = ceilings(tmp_path, ManualClock())
    with pytest.raises(CapsError) as refused:
        told.ask(limit, "", ttl, ROOT)
    assert refused.value.refusal == Refusal.MALFORMED


def test_a_ceiling_that_cannot_be_read_is_none_and_said_so(tmp_path: Path) -> None:
    (tmp_path / "ceilings.json").write_text("{")
    told = ceilings(tmp_path, ManualClock())
    assert told.limit is None
    assert "cannot be understood" in told.trouble


def test_a_lost_file_leaves_its_ceiling_over_a_restart(tmp_path: Path) -> None:
    written = tmp_path / "ceiling.toml"
    written.write_text("watts = 1000\n")
    clock = ManualClock()
    ceilings(tmp_path, clock, budget_file=str(written)).poll()
    written.unlink()
    restarted = ceilings(tmp_path, clock, budget_file=str(written))
    restarted.poll()
    assert restarted.limit == 1000 * W
    assert "stays in force" in restarted.trouble


# --------------------------------------------------------------------------- what it means


def test_a_fixed_cap_is_named_by_id_index_or_star(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for device, meant in (("gpu1", [1]), ("0", [0]), ("*", [0, 1]), ("gpu7", [])):
        settings = Caps(fixed=(FixedCap(device=device, watts=500),))
        fixed = impose(settings, None, bench.keeper).fixed
        assert fixed == {bench.key(n): 500 * W for n in meant}


def test_a_fixed_cap_of_one_knob_is_none_of_another(tmp_path: Path) -> None:
    settings = Caps(fixed=(FixedCap(device="*", watts=100, knob=Knob.CPU_POWER),))
    assert impose(settings, None, Bench(tmp_path).keeper).fixed == {}


def test_shares_keep_the_limit_and_go_by_priority(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    settings = Caps(priority=(Priority(device="1", priority=200),))
    shares = impose(settings, 900 * W, bench.keeper).shares
    assert shares == {bench.key(0): 250 * W, bench.key(1): 650 * W}


def test_what_a_tuner_does_not_want_the_others_get(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rules=Rules(0.3, 0, 1.0))
    bench.hold(300 * W, 0)
    shares = impose(Caps(), 900 * W, bench.keeper).shares
    assert shares[bench.key(1)] == 600 * W


def test_a_device_that_somebody_else_has_set_counts_with_what_it_has(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.hold(500 * W, 0)
    bench.board(0).stands = 640 * W
    bench.turn(1)
    shares = impose(Caps(), 900 * W, bench.keeper).shares
    assert shares == {bench.key(1): 260 * W}


def test_a_ceiling_below_what_devices_take_at_least_is_said_to_be_short(tmp_path: Path) -> None:
    imposed = impose(Caps(), 300 * W, Bench(tmp_path).keeper)
    assert imposed.short == 100 * W
    assert set(imposed.shares.values()) == {200 * W}


def test_the_budget_is_kept_and_everything_comes_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, boards=4, rules=Rules(0.6, 0, 0.25))
    for limit in (2000, 1200, 900, 2400):
        for _ in range(5):
            before = sum(bench.stands)
            bench.keeper.impose(impose(Caps(), limit * W, bench.keeper))
            bench.turn(1)
            assert sum(bench.stands) <= max(before, limit * W)
        assert sum(bench.stands) <= limit * W
    bench.keeper.impose(impose(Caps(), None, bench.keeper))
    bench.turn(1)
    assert bench.stands == [650 * W] * 4
