"""The store in good times: restarts, clocks, roll-ups, bounds."""

import os
import re
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.known_totals import GPU, PACKAGE, Books, J, buckets, history, owners, totals

from wattspan.config import StoreSettings as Settings
from wattspan.model import Checkpoint, Consumer, HwType, PayerInfo, ProcessRow, Remainder
from wattspan.model.settings import Duration, Size
from wattspan.ports import StoreError
from wattspan.storage.checkpoints import pack_checkpoint, unpack_checkpoint
from wattspan.storage.database import DAY, HOUR, MINUTE, UNTYPED_MIGRATIONS, connect, migrate
from wattspan.storage.deltas import CheckpointDelta, EnergyOwner, delta_between
from wattspan.storage.history import HistoryWriter
from wattspan.storage.query import DomainTotal, HistoryExtract, NoHistory, extract_history
from wattspan.storage.rates import record_rates
from wattspan.storage.store import Store
from wattspan.testing import ManualClock


@pytest.fixture
def host() -> Books:
    return Books()


def open_store(state_dir: Path, host: Books, settings: Settings | None = None) -> Store:
    return Store(state_dir, settings or Settings(), host.clock)


def test_new_store_has_no_opening(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path / "made" / "on" / "demand", host)) as store:
        assert store.last_checkpoint() is None
        assert store.health.up


def test_checkpoint_round_trips(tmp_path: Path, host: Books) -> None:
    written = host.spend({1: 10, 2: 5})
    with closing(open_store(tmp_path, host)) as store:
        assert store.write(written)
    with closing(open_store(tmp_path, host)) as store:
        assert store.last_checkpoint() == written


def test_checkpoint_excludes_transient_values() -> None:
    opening = Books().spend({1: 3})
    lively = replace(
        opening,
        accounts=tuple(replace(a, power=5, pending=7) for a in opening.accounts),
    )
    assert unpack_checkpoint(pack_checkpoint(lively)) == opening


def test_cgroup_remainder_round_trips() -> None:
    rows = tuple(
        ProcessRow(PayerInfo(payer, "x"), {}, {}) for payer in (Remainder("/a"), Consumer(1, 2))
    )
    opening = replace(Books().now(), processes=rows)
    assert unpack_checkpoint(pack_checkpoint(opening)).processes == rows


def test_totals_continue_over_restart_and_reboot(tmp_path: Path, host: Books) -> None:
    for boot in ("first", "first", "second"):
        host.boot_id = boot
        with closing(open_store(tmp_path, host)) as store:
            for _ in range(3):
                store.write(host.spend({1: 1}))
    assert history(store.path) == totals(host.now())


def test_delayed_totals_are_written_together_later(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        store.write(host.spend({1: 1}))
        for _ in range(100):
            host.spend({1: 1})
        store.write(host.now())
        assert history(store.path) == totals(host.now())


def test_older_checkpoint_is_not_written(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        first, second = host.spend({1: 1}), host.spend({1: 1})
        assert store.write(second)
        assert not store.write(first)
        assert not store.write(second)
        assert history(store.path) == totals(second)
        assert store.health.failed == 0


def test_closed_store_rejects_writes(tmp_path: Path, host: Books) -> None:
    store = open_store(tmp_path, host)
    store.close()
    store.close()
    assert not store.write(host.spend({1: 1}))


def test_energy_goes_to_the_minute_in_which_its_interval_ended(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        for _ in range(3):
            store.write(host.spend({1: 1}, seconds=60))
        last = host.clock.now().wall // 10**9 // 60 * 60
        assert buckets(store.path, MINUTE) == [last - 120, last - 60, last]


@pytest.mark.parametrize("step", [-3600, 3600, -86_400 * 365, 86_400 * 365])
def test_clock_step_neither_loses_nor_negates_energy(
    tmp_path: Path, host: Books, step: int
) -> None:
    with closing(open_store(tmp_path, host)) as store:
        for seconds in (0, step, 0, -step, 0):
            host.clock.step_wall(seconds)
            store.write(host.spend({1: 1}))
        assert history(store.path) == totals(host.now())
        with closing(sqlite3.connect(store.path)) as database:
            least = database.execute(
                "SELECT min(energy), min(consumers), min(idle), min(unattributed)"
                " FROM domain_energy"
            ).fetchone()
        assert min(least) >= 0


def test_clock_set_back_adds_to_existing_minutes(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        store.write(host.spend({1: 1}, seconds=60))
        before = buckets(store.path, MINUTE)
        host.clock.step_wall(-5)
        store.write(host.spend({1: 1}, seconds=5))
        assert buckets(store.path, MINUTE) == before
        assert history(store.path) == totals(host.now())


def test_wildly_wrong_clock_does_not_make_the_past_expire(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        store.write(host.spend({1: 1}))
        kept = buckets(store.path, MINUTE)
        host.clock.step_wall(80 * 365 * 86_400)
        store.write(host.spend({1: 1}))
        store.write(host.spend({1: 1}, seconds=3600))
        assert buckets(store.path, MINUTE)[:1] == kept


def test_minutes_become_hours_and_hours_become_days(tmp_path: Path, host: Books) -> None:
    settings = Settings(minutes=Duration.parse("1h"), hours=Duration.parse("1d"))
    with closing(open_store(tmp_path, host, settings)) as store:
        for _ in range(4 * 24 * 4):
            store.write(host.spend({1: 1}, seconds=900))
        assert 60 <= len(buckets(store.path, MINUTE)) < 60 + 4
        assert 24 <= len(buckets(store.path, HOUR)) < 24 + 24
        assert len(buckets(store.path, DAY)) >= 2
        assert all(start % HOUR == 0 for start in buckets(store.path, HOUR))
        assert all(start % DAY == 0 for start in buckets(store.path, DAY))
        assert max(buckets(store.path, HOUR)) < min(buckets(store.path, MINUTE))
        assert history(store.path) == totals(host.now())


def test_hour_is_the_sum_of_its_minutes(tmp_path: Path, host: Books) -> None:
    settings = Settings(minutes=Duration.parse("1h"))
    with closing(open_store(tmp_path, host, settings)) as store:
        host.clock.advance(HOUR - host.clock.now().wall // 10**9 % HOUR - 60)
        for _ in range(60):
            store.write(host.spend({1: 1, 2: 3}, seconds=60))
        (hour,) = {start // HOUR * HOUR for start in buckets(store.path, MINUTE)}
        minutes = history(store.path)
        for _ in range(130):
            store.write(host.spend({1: 1}, seconds=60))
        assert buckets(store.path, HOUR)[0] == hour
        assert _hour(store.path, hour) == minutes[PACKAGE.id, "energy"]


def test_days_beyond_the_last_are_forgotten(tmp_path: Path, host: Books) -> None:
    settings = Settings(
        minutes=Duration.parse("1h"), hours=Duration.parse("1d"), days=Duration.parse("3d")
    )
    with closing(open_store(tmp_path, host, settings)) as store:
        for _ in range(120):
            store.write(host.spend({1: 1}, seconds=6 * HOUR))
        assert len(buckets(store.path, DAY)) == 3


def test_bucket_names_only_the_greatest_and_the_rest_still_sums(
    tmp_path: Path, host: Books
) -> None:
    settings = Settings(processes=2, groups=3)
    with closing(open_store(tmp_path, host, settings)) as store:
        store.write(host.spend({pid: pid for pid in range(1, 11)}))
        store.write(host.spend({}, seconds=60))
        cpu = {name: e for (name, hw), e in owners(store.path, "process").items() if hw == "cpu"}
        assert cpu == {"job10": 10 * J, "job9": 9 * J, "": (36 + 2) * J}
        containers = owners(store.path, "container")
        assert set(containers) == {(c, h) for c in ("c10", "c9", "c8", "") for h in ("cpu", "gpu")}
        assert sum(e for (_, hw), e in containers.items() if hw == "gpu") == 55 * J


def test_unused_names_are_removed(tmp_path: Path, host: Books) -> None:
    settings = Settings(
        minutes=Duration.parse("1h"),
        hours=Duration.parse("1d"),
        days=Duration.parse("2d"),
        processes=5,
        groups=5,
    )
    with closing(open_store(tmp_path, host, settings)) as store:
        for turn in range(150):
            host.spent.clear()
            host.turns = 10 * turn  # the ended: their containers are gone with them
            store.write(host.spend({turn: 1}, seconds=3 * HOUR))
        with closing(sqlite3.connect(store.path)) as database:
            (names,) = database.execute("SELECT count(*) FROM owner").fetchone()
        assert names < 3 * (26 + 48 * 5 + 2 * 5)


def test_keys_of_earlier_minutes_are_not_in_memory(tmp_path: Path) -> None:
    with closing(connect(tmp_path / "names.sqlite3", ManualClock())) as database:
        writer = HistoryWriter(database, Settings())
        cached = []
        for minute in range(8):
            names = (f"{minute}-{number}" for number in range(10))
            owners = {EnergyOwner("container", HwType.CPU, name): 1 for name in names}
            writer.add(CheckpointDelta(minute * MINUTE * 10**9, (), owners))
            cached.append(writer.cached_keys)
        assert cached == [10] * 8


@pytest.mark.exhaustive
def test_store_reduces_resolution_to_stay_within_its_size(tmp_path: Path, host: Books) -> None:
    settings = Settings(max_size=Size(150_000))
    with closing(open_store(tmp_path, host, settings)) as store:
        load = dict.fromkeys(range(1, 40), 1)
        for _ in range(600):
            store.write(host.spend(load, seconds=60))
        assert history(store.path) == totals(host.now())
        assert len(buckets(store.path, MINUTE)) < 200
        assert buckets(store.path, HOUR)
    assert store.path.stat().st_size < 250_000


def test_domain_with_changed_provenance_is_stored_separately(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        store.write(host.spend({1: 1}))
        host.emulated = True
        store.write(host.spend({1: 2}))
        found = extract_history(store.path, 0, 2**40)
        assert isinstance(found, HistoryExtract)
        gpu = [d.provenance for d in found.domains if d.id == GPU.id]
        assert sorted(gpu) == ["derived", "emulated"]


def test_emulated_host_has_a_separate_store(tmp_path: Path, host: Books) -> None:
    true = Store(tmp_path, Settings(), host.clock)
    emulated = Store(tmp_path, Settings(), host.clock, emulated=True)
    emulated.write(host.spend({1: 1}))
    assert true.last_checkpoint() is None
    true.close()
    emulated.close()
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        assert store.last_checkpoint() is None


def test_reader_sees_concurrent_writes(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        store.write(host.spend({1: 1}))
        assert _package(store.path).energy == host.package
        store.write(host.spend({1: 5}))
        assert _package(store.path).energy == host.package
    assert _package(store.path).energy == host.package


def test_empty_range_error_names_available_history(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        assert extract_history(store.path, 0, 2**40) == NoHistory(None)
        store.write(host.spend({1: 1}))
        start = buckets(store.path, MINUTE)[0]
        assert extract_history(store.path, 0, start) == NoHistory((start, start + 60))
        assert isinstance(extract_history(store.path, start + 59, start + 60), HistoryExtract)


def test_stretch_is_widened_to_whole_buckets(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        for _ in range(10):
            store.write(host.spend({1: 1}, seconds=60))
        third = buckets(store.path, MINUTE)[2]
        found = extract_history(store.path, third + 10, third + 70, ["process"])
        assert isinstance(found, HistoryExtract)
        assert (found.start, found.end, found.steps) == (third, third + 120, (MINUTE,))
        assert sum(e for o, e in found.owners.items() if o.name == "job1") == 4 * J


def test_store_needs_no_newer_sqlite_than_enterprise_linux_has(host: Books) -> None:
    """Rocky Linux 9 has 3.34: https://github.com/OpenHands/OpenHands/issues/571."""
    statements: list[str] = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.set_trace_callback(statements.append)
        migrate(database, UNTYPED_MIGRATIONS)
        before = host.now()
        record_rates(database, before)
        writer = HistoryWriter(database, Settings(minutes=Duration.parse("1h")))
        for _ in range(130):
            after = host.spend({1: 1}, seconds=60)
            writer.add(delta_between(before, after))
            before = after
        (found,) = database.execute("SELECT count(*) FROM domain_energy WHERE step = 3600")
    assert found[0]
    newer = re.compile("STRICT|RETURNING|CONFLICT DO|sqlite_schema")
    assert [one for one in statements if newer.search(one)] == []


def test_typed_store_that_an_old_sqlite_cannot_read_is_left_alone(
    tmp_path: Path, host: Books
) -> None:
    open_store(tmp_path, host).close()
    path = tmp_path / "wattspan.sqlite"
    with closing(sqlite3.connect(path)) as database:
        # The error of this schema is that of SQLite 3.34 for one STRICT.
        database.executescript(
            "PRAGMA writable_schema = ON;"
            "UPDATE sqlite_master SET sql = replace(sql, ') STRICT', ') STRICT STRICT')"
        )
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"tables need SQLite 3\.37 or newer.*Use such a Python"):
        open_store(tmp_path, host)
    with pytest.raises(StoreError, match=r"tables need SQLite 3\.37 or newer.*Use such a Python"):
        extract_history(path, 0, 2**40)
    assert path.read_bytes() == content


def test_two_agents_never_write_one_store(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)) as store:
        with pytest.raises(StoreError, match=f"process {os.getpid()} is writing it"):
            open_store(tmp_path, host)
        assert store.write(host.spend({1: 1}))
    open_store(tmp_path, host).close()


def test_store_lock_file_is_private(tmp_path: Path, host: Books) -> None:
    lock = tmp_path / "wattspan.sqlite.lock"
    lock.touch(0o640)  # format of earlier versions
    with closing(open_store(tmp_path, host)):
        assert lock.stat().st_mode & 0o777 == 0o600


def test_idle_store_lock_holder_is_named(tmp_path: Path, host: Books) -> None:
    with closing(open_store(tmp_path, host)):
        (tmp_path / "wattspan.sqlite.lock").write_text("1\n")
        with pytest.raises(StoreError, match=f"process {os.getpid()} holds its lock .*End it"):
            open_store(tmp_path, host)


def _package(path: Path) -> DomainTotal:
    found = extract_history(path, 0, 2**40)
    assert isinstance(found, HistoryExtract)
    return next(domain for domain in found.domains if domain.id == PACKAGE.id)


def _hour(path: Path, start: int) -> int:
    with closing(sqlite3.connect(path)) as database:
        row = database.execute(
            "SELECT energy FROM domain_energy JOIN domain ON key = domain"
            " WHERE step = ? AND start = ? AND id = ?",
            (HOUR, start, PACKAGE.id),
        ).fetchone()
    return int(row[0])


FIRST_RELEASE = (
    '{"at":[1,2,3],"boot_id":"b","accounts":[{"domain":{"id":"package-0","hw_type":"cpu",'
    '"name":"package-0","source":"rapl","provenance":"measured","in_cover":true,"parent":null,'
    '"resource":"cpu:0","method":"cpu-time","max_power":2000000,"modulus":null,'
    '"resolution":1000000,"why":""},"energy":10,"consumers":7,"idle":2,"unattributed":1,'
    '"pending":0,"gaps":{"reset":4},"power":null,"idle_power":9,"settled":[1,2,3],'
    '"present":true}],"readings":[["package-0",[1,2,3],5,0]],"groups":[{"group":["user","u"],'
    '"energy":{"cpu":7}}],"processes":[{"payer":[1,2],"command":"c","user":"u","parent":null,'
    '"groups":[["user","u"]],"energy":{"cpu":4},"alive":true},{"payer":"/a","command":"c",'
    '"user":"","parent":1,"groups":[],"energy":{},"alive":false}],"other":{"cpu":3},'
    '"retired":{}}'
)


def test_checkpoint_of_the_first_release_is_readable() -> None:
    """If this fails, an upgrade would lose all counters: write a migration."""
    opening = unpack_checkpoint(zlib.compress(FIRST_RELEASE.encode()))
    assert isinstance(opening, Checkpoint)
    assert opening.accounts[0].consumers == 7
    assert [row.info.payer for row in opening.processes] == [Consumer(1, 2), Remainder("/a")]
