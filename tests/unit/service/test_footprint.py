"""Cost and carbon: configuration, restarts, snapshots."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.known_totals import Books, J
from testbed.snapshots import CPU, account

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.config import CarbonSettings, Config, CostSettings, load
from wattspan.config import StoreSettings as Settings
from wattspan.footprint.cost import KILOWATT_HOUR, Period, Schedule
from wattspan.model import (
    SECOND,
    Checkpoint,
    Footprint,
    Instant,
    Microjoules,
    RatedEnergy,
    RateOrigin,
    Reading,
    Snapshot,
)
from wattspan.ports import Batch, ConfigError
from wattspan.service.assembly import FootprintTracker
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import LatestSnapshot, Poller, SnapshotProviders
from wattspan.service.sampling_demand import fixed
from wattspan.storage.store import Store
from wattspan.testing import FakeDirectory, ManualClock, ReplaySource, ReplayUsage

NOW = Instant(10**12, 1_700_000_000 * SECOND)


def shot(energy: int, at: Instant = NOW) -> Snapshot:
    """One domain that has spent so many microjoules."""
    one = replace(
        account("package-0", CPU, "package-0", None, (0, 0, 0)), energy=Microjoules(energy)
    )
    return Snapshot(at=at, sequence=1, host="h", domains=(one,))


def footprints(
    cost: CostSettings | None = None,
    carbon: CarbonSettings | None = None,
    opening: Checkpoint | None = None,
) -> FootprintTracker:
    config = Config(cost=cost or CostSettings(), carbon=carbon or CarbonSettings())
    return FootprintTracker(config, ManualClock(), opening)


# ------------------------------------------------------------------------------------- weighing


def test_footprint_is_absent_without_rates() -> None:
    none = footprints()
    assert none.report(shot(KILOWATT_HOUR)) == Footprint()
    assert none.services.parts == []
    assert list(none.services.health()) == []


def test_failing_rate_counts_energy_as_unknown() -> None:
    class Failing:
        origin = RateOrigin.SCHEDULE

        def at(self, _when: Instant) -> int:
            raise RuntimeError("a fault of ours")

    both = footprints(CostSettings(price=0.3), CarbonSettings(intensity=380.0))
    both._rates["carbon"] = Failing(), both._rates["carbon"][1]  # type: ignore[assignment]
    weighed = both.report(shot(KILOWATT_HOUR))
    assert weighed.cost.total == 300_000_000
    assert weighed.carbon.rate is None
    assert weighed.carbon.unknown == KILOWATT_HOUR


def test_kilowatt_hour_has_its_price_and_intensity() -> None:
    both = footprints(CostSettings(price=0.3), CarbonSettings(intensity=380.5))
    assert both.report(shot(KILOWATT_HOUR)) == Footprint(
        RatedEnergy("EUR", RateOrigin.CONSTANT, 300_000_000, 300_000_000),
        RatedEnergy("g", RateOrigin.CONSTANT, 380_500_000_000, 380_500_000_000),
    )


def test_price_of_zero_is_a_rate() -> None:
    assert footprints(CostSettings(price=0.0)).report(shot(5)).cost == RatedEnergy(
        "EUR", RateOrigin.CONSTANT, 0
    )


def test_energy_before_the_first_rate_is_not_counted() -> None:
    opening = Checkpoint(NOW, "boot", accounts=shot(5 * KILOWATT_HOUR).domains)
    weighed = (
        footprints(CostSettings(price=1.0), opening=opening).report(shot(6 * KILOWATT_HOUR)).cost
    )
    assert (weighed.total, weighed.unknown) == (10**9, 0)


def test_totals_continue_after_a_restart() -> None:
    before = RatedEnergy("EUR", RateOrigin.SCHEDULE, None, 7 * 10**9, Microjoules(3))
    opening = Checkpoint(NOW, "boot", accounts=shot(5).domains, footprint=Footprint(before))
    weighed = (
        footprints(CostSettings(price=1.0), opening=opening).report(shot(5 + KILOWATT_HOUR)).cost
    )
    assert weighed == RatedEnergy("EUR", RateOrigin.CONSTANT, 10**9, 8 * 10**9, Microjoules(3))


def test_another_currency_begins_at_zero() -> None:
    before = RatedEnergy("EUR", RateOrigin.CONSTANT, None, 7 * 10**9, Microjoules(3))
    opening = Checkpoint(NOW, "boot", accounts=shot(5).domains, footprint=Footprint(before))
    weighed = (
        footprints(CostSettings(price=1.0, currency="CHF"), opening=opening).report(shot(5)).cost
    )
    assert weighed == RatedEnergy("CHF", RateOrigin.CONSTANT, 10**9)


def test_schedule_applies_the_rate_at_the_time_of_booking(tmp_path: Path) -> None:
    path = tmp_path / "tariff.toml"
    path.write_text(
        'zone = "UTC"\n[[period]]\nrate = 1\nto = "12:00"\n[[period]]\nrate = 3\nfrom = "12:00"\n'
        'to = "13:00"\n'
    )
    prints = footprints(CostSettings(schedule=str(path)))
    noon = 1_700_006_400 // 86400 * 86400 + 12 * 3600
    total = []
    for hour, energy in ((-1, 1), (0, 2), (1, 3)):
        at = Instant(0, (noon + 3600 * hour) * SECOND)
        total.append(prints.report(shot(energy * KILOWATT_HOUR, at)).cost)
    assert [(w.rate, w.total, w.unknown) for w in total if w] == [
        (10**9, 10**9, 0),
        (3 * 10**9, 4 * 10**9, 0),
        (None, 4 * 10**9, KILOWATT_HOUR),
    ]
    assert [health.source for health in prints.services.health()] == ["cost"]
    assert len(prints.services.parts) == 1


def test_rate_follows_a_file(tmp_path: Path) -> None:
    path = tmp_path / "intensity"
    path.write_text("412")
    prints = footprints(carbon=CarbonSettings(file=str(path), max_age=CostSettings().max_age))
    assert prints.report(shot(7)).carbon == RatedEnergy(
        "g", RateOrigin.METRIC, None, 0, Microjoules(7)
    )
    assert [one.source for one in prints.services.health()] == ["carbon"]
    assert len(prints.services.parts) == 1


# ------------------------------------------------------------------------- through the poller


def test_snapshot_and_checkpoint_have_the_footprint_of_their_energy() -> None:
    clock = ManualClock()
    domain = replace(account("package-0", CPU, "p", None, (0, 0, 0)).domain, resource=None)

    def batches() -> list[Batch]:
        readings = [Reading(domain.id, clock.now(), Microjoules(0))]
        readings.append(Reading(domain.id, clock.advance(1), Microjoules(36 * J)))
        return [Batch((domain,), (reading,)) for reading in readings]

    kept: list[Checkpoint] = []
    ledger = Ledger(LedgerSettings(), now=clock.monotonic())
    poller = Poller(
        clock,
        ledger,
        EnergyHistory(SECOND, 10**6),
        (ReplaySource(batches()),),
        ReplayUsage([]),
        FakeDirectory({}),
        LatestSnapshot(ledger.snapshot(clock.now(), "h")),
        demand=fixed(clock, SECOND),
        providers=SnapshotProviders(footprint=footprints(CostSettings(price=1.0)).report),
        save=kept.append,
    )
    poller.turn()
    clock.advance(1)
    poller.turn()
    poller.publish()
    cost = poller.view().footprint.cost
    assert cost.total == 36 * J * 10**9 // KILOWATT_HOUR
    assert kept[-1].footprint.cost == cost


def test_footprint_survives_a_restart_in_the_store(tmp_path: Path) -> None:
    host = Books(ManualClock())
    weighed = Footprint(RatedEnergy("EUR", RateOrigin.METRIC, 10**15, 2**70, Microjoules(9)))
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        assert store.write(replace(host.spend({1: 1}), footprint=weighed))
    with closing(Store(tmp_path, Settings(), host.clock)) as store:
        opening = store.last_checkpoint()
    assert opening.footprint == weighed


# -------------------------------------------------------------------------------- configuration


def faults(text: str, tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '[cost]\nprice = 0.3\nfile = "/p"',
            "3: Bad value for 'cost.file': price also sets the rate",
        ),
        (
            '[carbon]\nurl = "http://x"\nquery = "q"\nschedule = "/s"',
            "'carbon.url': schedule also sets the rate",
        ),
        ("[cost]\nprice = -0.1", "out of bounds, at least 0"),
        ("[cost]\nprice = nan", "out of bounds"),
        ("[cost]\nprice = 1e12", "out of bounds, at most 1000000"),
        ('[cost]\nprice = "0.3"', "expected number"),
        ("[carbon]\nprice = 0.3", "Unknown key 'carbon.price'"),
        ('[cost]\nurl = "http://x"', "'cost.url': query is empty. Set query."),
        ('[cost]\nquery = "x"', "'cost.query': url is empty. Set url."),
        ('[cost]\nquery = "x"\nurl = "file:///etc/passwd"', "is not an address such as"),
        ('[cost]\nquery = "x"\nurl = "localhost:9090"', "is not an address such as"),
        ('[cost]\nquery = "x"\nurl = "http://x:99999"', "is not an address: Port out of range"),
        ('[cost]\nquery = "x"\nurl = "http://x/?a=b"', "write the query into `query`"),
        ('[cost]\nquery = "x"\nurl = "http://x/ y"', "is not an address such as"),
        ('[cost]\nschedule = "tariff.toml"', "is a relative path"),
        ('[cost]\nfactor = 0\nfile = "/p"', "out of bounds"),
        ('[cost]\nrefresh = "0s"', "out of bounds"),
        (
            '[cost]\nfile = "/p"\nrefresh = "1h"',
            "Bad value for 'cost.refresh': the interval 1h is longer than the validity",
        ),
    ],
)
def test_invalid_setting_is_reported_by_key(text: str, why: str, tmp_path: Path) -> None:
    assert why in faults(text, tmp_path)


@pytest.mark.parametrize("currency", ["", "EUR\\n", 'E"R', "€", "EU R", "A" * 13, "{x}"])
def test_currency_accepts_letters_only(currency: str, tmp_path: Path) -> None:
    told = faults(f"[cost]\ncurrency = '{currency}'", tmp_path)
    assert "is not a currency" in told


def test_password_in_an_address_is_refused_and_not_displayed(tmp_path: Path) -> None:
    told = faults('[cost]\nquery = "x"\nurl = "http://me:hunter2@x"', tmp_path)
    assert "wattspan sends no user names and passwords" in told
    assert "hunter2" not in told


def test_price_can_be_set_by_the_environment() -> None:
    environ = {"WATTSPAN_COST_PRICE": "0.31", "WATTSPAN_COST_CURRENCY": "credits"}
    config = load(None, environ=environ, default=Path("/nonexistent"))
    assert (config.cost.price, config.cost.currency) == (0.31, "credits")


def test_schedule_without_periods_and_default_has_no_rate() -> None:
    from datetime import UTC

    assert Schedule(UTC, ()).rate(0) is None
    assert list(Schedule(UTC, (Period(5, 0, 60),)).periods_between(0, 7200))[:5] == [
        (900, 5), (900, 5), (900, 5), (900, 5), (900, None),
    ]  # fmt: skip
