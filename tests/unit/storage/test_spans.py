"""Spans in the store: by name and bucket, bounded, and never counted twice."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.joined_spans import CPU, GPU, S, joined
from testbed.known_totals import Books, Totals, buckets, history, totals

from wattspan.config import StoreSettings as Settings
from wattspan.model import (
    Checkpoint,
    HostRequests,
    InferenceRow,
    Instant,
    Microjoules,
    SpanRow,
    StaticBasis,
    StaticSplit,
)
from wattspan.model.settings import Duration
from wattspan.spans.aggregator import SpanAggregator
from wattspan.storage.checkpoints import (
    AlternatingCheckpointFiles,
    pack_checkpoint,
    unpack_checkpoint,
)
from wattspan.storage.database import DAY, HOUR, MIGRATIONS, MINUTE, schema_version
from wattspan.storage.deltas import (
    MAX_STORED_INTEGER,
    MODEL,
    REST_OF_MODELS,
    REST_OF_SPANS,
    SPAN,
    HostPart,
    SpanName,
    SpanUsage,
    UsageRole,
    spans_between,
    total_split,
    total_usage,
)
from wattspan.storage.query import HistoryExtract, extract_history
from wattspan.storage.store import Store


def named(name: str, service: str = "shop") -> SpanName:
    return SpanName(UsageRole.NAMED, service, name)


PAY, SHIP = named("pay"), named("ship")
OUTSIDE = SpanName(UsageRole.OUTSIDE, "shop")


class Shop:
    """A host whose spans are totalled and stored."""

    def __init__(self, names: int = 100) -> None:
        self.host = Books()
        self.totals = SpanAggregator(names)

    def now(self) -> Checkpoint:
        accounts = self.totals.accounts()
        return replace(self.host.now(), spans=accounts.rows, outside=accounts.outside)

    def sell(self, seconds: float = 5.0, **microjoules: int) -> Checkpoint:
        """A second of each name, with 3 tokens in and 2 out, and 1 uJ outside of all."""
        self.host.spend({1: 1}, seconds=seconds)
        at = self.host.clock.now()
        self.totals.add(
            [joined(name, {CPU: e, GPU: 2 * e}, tokens=(3, 2)) for name, e in microjoules.items()],
            at,
        )
        self.totals.outside("shop", CPU, 1)
        return self.now()

    def open(self, state_dir: Path, **settings: object) -> Store:
        return Store(state_dir, Settings(**settings), self.host.clock)  # type: ignore[arg-type]


def stored(path: Path) -> dict[SpanName, SpanUsage]:
    found = extract_history(path, 0, 2**40, [SPAN])
    assert isinstance(found, HistoryExtract)
    return dict(found.spans)


def use(energy: int, calls: int = 1) -> SpanUsage:
    return SpanUsage({CPU: energy, GPU: 2 * energy}, calls, calls * S, 3 * calls, 2 * calls)


def test_span_names_have_their_energy_in_the_history(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(shop.sell(pay=5, ship=7))
        store.write(shop.sell(pay=6))
        store.write(shop.sell(seconds=60))
        assert stored(store.path) == {
            PAY: use(11, calls=2),
            SHIP: use(7),
            OUTSIDE: SpanUsage({CPU: 3}),
        }


def test_range_holds_the_spans_ended_in_it(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        for energy in range(1, 6):
            store.write(shop.sell(seconds=60, pay=energy))
        third = buckets(store.path, MINUTE)[2]
        found = extract_history(store.path, third, third + 120, [SPAN])
        assert isinstance(found, HistoryExtract)
        assert found.spans[PAY] == use(3 + 4, calls=2)


def test_spans_are_read_only_on_request(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(shop.sell(pay=5))
        found = extract_history(store.path, 0, 2**40, ["process"])
        assert isinstance(found, HistoryExtract)
        assert found.spans == {}


def test_span_totals_continue_over_a_restart(tmp_path: Path) -> None:
    shop = Shop()
    for energy in (5, 6, 7):
        with closing(shop.open(tmp_path)) as store:
            opening = store.last_checkpoint()
            if opening is not None:
                shop.totals = SpanAggregator(100, opening.spans, opening.outside)
            store.write(shop.sell(pay=energy))
            store.write(shop.sell(pay=energy))
    assert stored(store.path)[PAY] == use(36, calls=6)
    assert stored(store.path)[OUTSIDE] == SpanUsage({CPU: 6})


def test_restarted_span_totals_count_in_full(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(shop.sell(pay=50))
        store.write(shop.sell(pay=50))
        shop.totals = SpanAggregator(100)
        store.write(shop.sell(pay=7))
        assert stored(store.path)[PAY] == use(107, calls=3)


def test_next_write_includes_a_failed_one(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(shop.sell(pay=5))
        for _ in range(10):
            shop.sell(pay=1)
        store._detach()  # as after a failure: the file is reopened and its checkpoint loaded
        assert store.write(shop.now())
        assert stored(store.path)[PAY] == use(15, calls=11)


def test_checkpoint_restores_spans_without_transient_values(tmp_path: Path) -> None:
    shop = Shop()
    opening = shop.sell(pay=5)
    assert opening.spans[0].exemplars
    again = unpack_checkpoint(pack_checkpoint(opening))
    assert again.spans == tuple(replace(row, exemplars={}) for row in opening.spans)
    assert again.outside == opening.outside
    latest = AlternatingCheckpointFiles(tmp_path / "x.sqlite")
    latest.write(opening)
    latest.close()
    latest = AlternatingCheckpointFiles(tmp_path / "x.sqlite")
    assert latest.previous() == again
    latest.close()


def test_undecodable_names_are_stored(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        assert store.write(shop.sell(**{"\ud800": 5, "nul\x00": 6}))
        assert total_usage(stored(store.path).values()).calls == 2
    assert unpack_checkpoint(pack_checkpoint(shop.now())).spans[0].name == "\ud800"


def test_roll_ups_keep_every_sum(tmp_path: Path) -> None:
    shop = Shop()
    with closing(
        shop.open(tmp_path, minutes=Duration.parse("1h"), hours=Duration.parse("1d"))
    ) as store:
        for turn in range(4 * 24 * 4):
            store.write(shop.sell(seconds=900, pay=turn, ship=1))
        assert buckets(store.path, HOUR)
        assert buckets(store.path, DAY)
        assert stored(store.path) == {
            PAY: use(383 * 384 // 2, calls=384),
            SHIP: use(384, calls=384),
            OUTSIDE: SpanUsage({CPU: 384}),
        }
        assert history(store.path) == totals(shop.now())


def test_bucket_names_only_the_greatest_and_the_rest_still_sums(tmp_path: Path) -> None:
    shop = Shop(names=8)
    with closing(shop.open(tmp_path, spans=2)) as store:
        store.write(shop.sell(**{f"n{n}": n for n in range(1, 11)}))
        whole = total_usage(stored(store.path).values())
        store.write(shop.sell(seconds=60))
        found = stored(store.path)
        spans = {name: one for name, one in found.items() if name.role is not UsageRole.OUTSIDE}
        assert set(spans) == {named("n8"), named("n7"), REST_OF_SPANS}
        assert spans[REST_OF_SPANS].energy == {CPU: 55 - 15, GPU: 110 - 30}
        assert total_usage(found.values()) == whole + SpanUsage({CPU: 1})


def test_services_beyond_the_bound_share_their_outside(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path, spans=2)) as store:
        for n in range(5):
            shop.totals.outside(f"s{n}", CPU, 10 + n)
        store.write(shop.sell())
        store.write(shop.sell(seconds=60))
        found = stored(store.path)
        outside = {one.service: use.energy[CPU] for one, use in found.items()}
        assert outside == {"s4": 14, "s3": 13, "other": 10 + 11 + 12 + 1, "shop": 1}


def asked(model: str, requests: int, energy: int = 100) -> InferenceRow:
    counts, tokens = {"model": requests}, {"input": 3 * requests, "output": 2 * requests}
    parts = {"input": Microjoules(energy * requests), "output": Microjoules(energy * requests)}
    return InferenceRow("llm", model, parts, tokens, counts, ())


def requests_usage(energy: int, requests: int) -> SpanUsage:
    divisions = {"model": requests}
    return SpanUsage({GPU: energy}, requests, 0, 3 * requests, 2 * requests, divisions=divisions)


def model(name: str, service: str = "llm") -> SpanName:
    return SpanName(UsageRole.MODEL, service, name)


def test_models_have_their_energy_in_the_history(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(replace(shop.sell(), inference=(asked("a", 2),)))
        store.write(replace(shop.sell(), inference=(asked("a", 5), asked("b", 1))))
        found = extract_history(store.path, 0, 2**40, [MODEL])
        assert isinstance(found, HistoryExtract)
        models = {key: one for key, one in found.spans.items() if key.role is UsageRole.MODEL}
        assert models == {
            model("a"): requests_usage(1000, 5),
            model("b"): requests_usage(200, 1),
        }


def on_host(row: InferenceRow, requests: int, **parts: int) -> InferenceRow:
    energy = {part: Microjoules(each * requests) for part, each in parts.items()}
    tokens = {"input": 3 * requests, "output": 2 * requests}
    counts = dict.fromkeys(parts, (requests, tokens["output"]))
    return replace(row, host=HostRequests(energy, tokens, requests, counts=counts))


def test_energy_of_requests_on_the_whole_host_is_in_the_history(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path, minutes=Duration.parse("1h"))) as store:
        for requests in (2, 5, 9):
            row = on_host(asked("a", requests + 1), requests, gpu=200, cpu=10, idle=0)
            store.write(replace(shop.sell(seconds=3 * HOUR), inference=(row,)))
        found = stored(store.path)[model("a")]
    assert (found.calls, found.energy) == (10, {GPU: 2000})
    assert found.host == {
        "gpu": HostPart(1800, 9, 18), "cpu": HostPart(90, 9, 18), "idle": HostPart(0, 9, 18),
    }  # fmt: skip


def test_energy_on_the_whole_host_counts_from_zero_after_a_restart() -> None:
    before, after = (
        replace(books(), inference=(on_host(asked("a", n), n, gpu=200, cpu=10),)) for n in (4, 3)
    )
    assert spans_between(before, after)[model("a")].host["cpu"] == HostPart(30, 3, 6)
    assert spans_between(before, before) == {}


def test_parts_on_the_whole_host_are_summed_by_part() -> None:
    one = SpanUsage(host={"gpu": HostPart(5, 2, 9), "cpu": HostPart(3, 2, 9)})
    other = SpanUsage(host={"gpu": HostPart(1, 1, MAX_STORED_INTEGER)})
    assert total_usage([one, other]).host == {
        "gpu": HostPart(6, 3, MAX_STORED_INTEGER), "cpu": HostPart(3, 2, 9),
    }  # fmt: skip


def test_requests_without_known_energy_on_the_whole_host_have_no_parts() -> None:
    before = replace(books(), inference=(on_host(asked("a", 4), 2, gpu=200, cpu=10),))
    after = replace(books(), inference=(on_host(asked("a", 5), 2, gpu=200, cpu=10),))
    assert spans_between(before, after)[model("a")].host == {}


def test_part_that_is_counted_no_more_is_unknown_and_a_part_of_zero_is_known() -> None:
    earlier = on_host(asked("a", 4), 4, gpu=200, cpu=10, memory=5, idle=0)
    counts = {"gpu": (7, 14), "cpu": (7, 14), "memory": (4, 8), "idle": (6, 12)}
    energy = {**earlier.host.energy, "gpu": Microjoules(1400), "cpu": Microjoules(70)}
    host = HostRequests(energy, {"input": 21, "output": 14}, 7, counts=counts)
    before = replace(books(), inference=(earlier,))
    after = replace(books(), inference=(replace(asked("a", 7), host=host),))
    assert spans_between(before, after)[model("a")].host == {
        "gpu": HostPart(600, 3, 6), "cpu": HostPart(30, 3, 6), "idle": HostPart(0, 2, 4),
    }  # fmt: skip


def test_usage_of_one_hardware_type_has_its_part_only() -> None:
    use = SpanUsage(host={part: HostPart(1, 2, 3) for part in ("gpu", "cpu", "idle")})
    assert use.only(CPU).host == {"cpu": HostPart(1, 2, 3)}


def test_models_beyond_the_bound_share_a_row(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path, spans=2)) as store:
        rows = tuple(asked(f"m{n}", 1, 10 + n) for n in range(5))
        store.write(replace(shop.sell(), inference=rows))
        store.write(replace(shop.sell(seconds=60), inference=rows))
        found = {key.name: use for key, use in stored(store.path).items() if key.service == "llm"}
        assert found.keys() == {"m3", "m4"}
        assert stored(store.path)[REST_OF_MODELS].energy == {GPU: 2 * (10 + 11 + 12)}


def test_restarted_totals_of_models_count_from_zero() -> None:
    before = replace(books(), inference=(asked("a", 5),))
    after = replace(books(), inference=(asked("a", 2),))
    assert spans_between(before, after) == {model("a"): requests_usage(400, 2)}
    assert spans_between(after, after) == {}


def test_requests_keep_their_division_in_the_history(tmp_path: Path) -> None:
    shop = Shop()
    bounds = {name: Duration.parse(text) for name, text in (("minutes", "1h"), ("hours", "1d"))}
    learned, by_tokens = 0, 0
    with closing(shop.open(tmp_path, **bounds, spans=1)) as store:
        for turn in range(4 * 24 * 3):
            learned, by_tokens = learned + turn % 3, by_tokens + turn % 2
            rows = tuple(
                replace(asked(name, 1), requests={"model": learned, "tokens": by_tokens})
                for name in ("a", "b")
            )
            store.write(replace(shop.sell(seconds=900), inference=rows))
        assert buckets(store.path, DAY)
        found = total_usage(
            usage for key, usage in stored(store.path).items() if key.role is UsageRole.MODEL
        )
    assert found.divisions == {"model": 2 * learned, "tokens": 2 * by_tokens}
    assert found.calls == 2 * (learned + by_tokens)


def test_requests_of_an_earlier_version_have_no_division(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(replace(shop.sell(), inference=(asked("a", 2),)))
    with closing(sqlite3.connect(store.path)) as database:
        for table in ("request_division", "request_host"):
            database.execute(f"DROP TABLE {table}")
        database.execute("PRAGMA user_version = 5")
        database.commit()
    with closing(shop.open(tmp_path)) as store:
        store.write(replace(shop.sell(), inference=(asked("a", 5),)))
        usage = stored(store.path)[model("a")]
    assert (usage.calls, usage.divisions) == (5, {"model": 3})


def test_restart_that_only_one_division_shows_counts_from_zero() -> None:
    before = replace(asked("a", 1), requests={"model": 4, "tokens": 6})
    after = replace(asked("a", 12), requests={"model": 9, "tokens": 3})
    between = spans_between(
        replace(books(), inference=(before,)), replace(books(), inference=(after,))
    )
    assert between[model("a")].calls == 12
    assert between[model("a")].divisions == {"model": 9, "tokens": 3}


def test_unused_names_are_removed(tmp_path: Path) -> None:
    shop = Shop(names=5)
    bounds = {name: Duration.parse(text) for name, text in (("minutes", "1h"), ("hours", "1d"))}
    with closing(shop.open(tmp_path, **bounds, days=Duration.parse("2d"), spans=2)) as store:
        for turn in range(150):
            store.write(shop.sell(seconds=3 * HOUR, **{f"n{turn}": 1}))
        with closing(sqlite3.connect(store.path)) as database:
            (names,) = database.execute("SELECT count(*) FROM span").fetchone()
        assert names < 100


def test_absurd_claims_of_time_and_tokens_fit_the_file(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path, minutes=Duration.parse("1h"))) as store:
        claim = 0
        for _ in range(200):
            claim += 2**62
            row = SpanRow(
                "shop", "old", {CPU: Microjoules(1)}, claim, 1, {"input": claim, "output": claim}
            )
            assert store.write(replace(shop.sell(seconds=60), spans=(row,)))
        assert store.health.failed == 0
        assert stored(store.path)[named("old")].nanoseconds >= MAX_STORED_INTEGER


def test_store_of_the_first_release_is_brought_up_to_date(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(replace(shop.sell(), spans=(), outside={}))
    with closing(sqlite3.connect(store.path)) as database:
        for table in ("span", "span_energy", "span_split", "span_work", "request_division",
                      "request_host", "rate"):  # fmt: skip
            database.execute(f"DROP TABLE {table}")
        database.execute("PRAGMA user_version = 1")
        database.commit()
    before = _without_withheld(history(store.path))
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("ALTER TABLE domain_energy DROP COLUMN withheld")
        database.commit()
        assert schema_version(database) == 1
    with closing(shop.open(tmp_path)) as store:
        assert history(store.path) == before
        assert store.write(shop.sell(pay=4))
        assert stored(store.path)[PAY] == use(4)
        assert _without_withheld(history(store.path)) == _without_withheld(totals(shop.now()))
    with closing(sqlite3.connect(store.path)) as database:
        assert schema_version(database) == len(MIGRATIONS) == 8


def _without_withheld(found: Totals) -> Totals:
    """The totals that the first release stored."""
    return {key: value for key, value in found.items() if key[1] != "withheld"}


# -------------------------------------------------------------------------------- differences


def books(*rows: SpanRow, **outside: int) -> Checkpoint:
    spent = {(service, "", CPU): Microjoules(energy) for service, energy in outside.items()}
    return Checkpoint(Instant(0, 0), "boot", spans=rows, outside=spent)


def row(energy: int, count: int, time: int = 0) -> SpanRow:
    return SpanRow("shop", "pay", {CPU: Microjoules(energy)}, time, count)  # type: ignore[arg-type]


def test_unchanged_totals_are_omitted() -> None:
    assert spans_between(books(row(5, 1), shop=3), books(row(5, 1), shop=3)) == {}


def test_returning_span_name_counts_from_zero() -> None:
    assert spans_between(books(row(50, 9)), books(row(60, 2))) == {PAY: SpanUsage({CPU: 60}, 2)}


@pytest.mark.parametrize("earlier", [None, books()])
def test_span_delta_without_a_checkpoint_is_the_full_total(earlier: Checkpoint | None) -> None:
    assert spans_between(earlier, books(row(5, 1, 7), shop=3)) == {
        PAY: SpanUsage({CPU: 5}, 1, 7),
        OUTSIDE: SpanUsage({CPU: 3}),
    }


def test_row_of_all_others_is_the_rest() -> None:
    other = SpanRow("other", "other", {CPU: Microjoules(2)}, count=1)  # type: ignore[arg-type]
    assert spans_between(None, books(other)) == {REST_OF_SPANS: SpanUsage({CPU: 2}, 1)}


# --------------------------------------------------------------------- static and dynamic energy


def split_use(static: int, dynamic: int) -> dict[StaticBasis, StaticSplit]:
    return {StaticBasis.FITTED: StaticSplit(Microjoules(static), Microjoules(dynamic))}


def step(shop: Shop, energy: int, static: int) -> Checkpoint:
    shop.host.spend({1: 1}, seconds=5)
    one = joined("step", {GPU: energy})._replace(
        static=Microjoules(static), basis=StaticBasis.FITTED
    )
    shop.totals.add([one], shop.host.clock.now())
    return shop.now()


def test_splits_are_reported_over_a_restart(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path)) as store:
        store.write(step(shop, 100, 30))
        store.write(step(shop, 60, 20))
    with closing(shop.open(tmp_path)) as store:
        previous = store.previous
        assert previous.spans[0].splits == split_use(50, 110)
        shop.totals = SpanAggregator(100, previous.spans, now=shop.host.clock.now().mono)
        store.write(step(shop, 10, 1))
        use = stored(store.path)[named("step")]
        assert use.splits == split_use(51, 119)
        assert sum(map(sum, use.splits.values())) == use.energy[GPU] == 170


def test_splits_of_small_names_are_summed_with_their_energy(tmp_path: Path) -> None:
    shop = Shop()
    with closing(shop.open(tmp_path, spans=1)) as store:
        store.write(shop.sell(pay=500))
        store.write(step(shop, 100, 30))
        store.write(shop.sell(seconds=70, pay=500))
        store.write(shop.sell(seconds=70, pay=500))
        rest = stored(store.path)[REST_OF_SPANS]
        assert rest.splits == split_use(30, 70)


def test_splits_add_up_by_basis() -> None:
    low = {StaticBasis.LOWER_BOUND: StaticSplit(Microjoules(0), Microjoules(9))}
    total = total_usage(
        [
            SpanUsage(splits=split_use(1, 2)),
            SpanUsage(splits=low),
            SpanUsage(splits=split_use(3, 4)),
        ]
    )
    assert total.splits == low | split_use(4, 6)
    assert total_split(total.splits) == (4, 15, StaticBasis.LOWER_BOUND)
    assert total.only(CPU).splits == {}
    assert total.only(GPU).splits == total.splits
