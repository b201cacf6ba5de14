"""Energy cost on a running agent: asked of servers that come and go, over restarts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from testbed.live_host import LiveAgent
from testbed.prometheus_server import scraping
from testbed.rate_server import serving, vector
from testbed.waiting import eventually

from wattspan.footprint.cost import KILOWATT_HOUR
from wattspan.footprint.price_and_carbon import NumberError, query_number
from wattspan.model import RatedEnergy, Snapshot, SourceHealth

PROFILE = "two-socket-h100"


def cost(agent: LiveAgent) -> RatedEnergy:
    found = agent.agent.view().footprint.cost
    assert found is not None
    return found


def cover(snapshot: Snapshot) -> int:
    return sum(account.energy for account in snapshot.cover)


def after(agent: LiveAgent, what: str, holds: Callable[[RatedEnergy], bool]) -> RatedEnergy:
    """The very look at which it holds: a price that is a second old is none at the next."""
    (found,) = eventually(lambda: [now for now in (cost(agent),) if holds(now)], what)
    return found


def health(agent: LiveAgent) -> SourceHealth:
    return next(h for h in agent.agent.view().health if h.source == "cost")


def balanced(agent: LiveAgent, price: int) -> bool:
    """Every microjoule of the cover is weighed at the price, in whole currency, or is unknown."""
    snapshot = agent.agent.view()
    weighed = snapshot.footprint.cost
    known = cover(snapshot) - weighed.unknown
    return abs(weighed.total - known * price * 10**9 // KILOWATT_HOUR) <= 1


def test_lost_rate_server_leaves_energy_unpriced(
    tmp_path: Path,
) -> None:
    with ExitStack() as server:
        url, asked = server.enter_context(serving(vector("2000000")))
        settings = {
            "cost.url": url, "cost.query": "price", "cost.factor": 0.001,
            "cost.refresh": "1s", "cost.max_age": "1s", "cost.timeout": "1s",
        }  # fmt: skip
        with LiveAgent(PROFILE, tmp_path, **settings) as agent:
            begun = after(agent, "it costs", lambda c: c.total > 0 and c.rate is not None)
            assert begun.rate == 2000 * 10**9
            assert asked
            server.close()
            eventually(lambda: "refused" in str(health(agent).failures), "it is missed")
            gone = after(agent, "the price is unknown", lambda c: c.rate is None)
            lost = after(agent, "energy is unweighed", lambda c: c.unknown > gone.unknown)
            assert lost.total == gone.total
            assert balanced(agent, 2000)
            told = health(agent)
            assert not told.up
            assert "connection refused" in str(told.failures[0])
            agent.stop()
            closed = cost(agent)
    with (
        serving(vector("2000000")) as (again, _),
        LiveAgent(PROFILE, tmp_path, **settings | {"cost.url": again}) as agent,
    ):
        resumed = after(agent, "it goes on", lambda c: c.total > closed.total)
        assert resumed.unknown >= closed.unknown
        agent.stop()
        assert balanced(agent, 2000)


def test_tariff_file_prices_measured_energy(tmp_path: Path) -> None:
    tariff = tmp_path / "tariff.toml"
    tariff.write_text('zone = "UTC"\notherwise = 1000\n')
    with LiveAgent(PROFILE, tmp_path, **{"cost.schedule": str(tariff)}) as agent:
        after(agent, "something costs", lambda c: c.total > 0)
        assert balanced(agent, 1000)


@pytest.mark.needs_prometheus
def test_real_prometheus_is_understood(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with scraping(tmp_path, port, []):
        assert query_number(url, "vector(0.25)", 10).number == 0.25
        assert query_number(url, "scalar(vector(380))", 10).number == 380
        with pytest.raises(NumberError, match="the query yields nothing"):
            query_number(url, "no_such_metric", 10)
        with pytest.raises(NumberError, match='the server reports "invalid parameter'):
            query_number(url, "sum(", 10)
        with pytest.raises(NumberError, match='yields a "matrix"'):
            query_number(url, "vector(1)[5m:1m]", 10)
        with pytest.raises(NumberError, match='yields a "string"'):
            query_number(url, '"text"', 10)
        nan = query_number(url, "vector(0) / vector(0)", 10).number
        assert nan != nan
