"""The processes of engines for language models."""

from __future__ import annotations

from wattspan.model import SECOND, Consumer, Instant, PayerInfo, Principal, Tick
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.serving_engines import ServingEngines
from wattspan.sharing.pools import PoolName, Pools

SERVER, ANN = Consumer(10, 1), Principal(1000)


def _at(second: int) -> Instant:
    return Instant(second * SECOND, second * SECOND)


def _born(second: int, *processes: Consumer) -> Tick:
    parents = (1 if one == SERVER else SERVER.pid for one in processes)
    pairs = zip(processes, parents, strict=True)
    births = [PayerInfo(one, "python", parent=parent, principal=ANN) for one, parent in pairs]
    return Tick(_at(second), births=births)


def test_ended_processes_of_an_engine_are_forgotten_with_the_history() -> None:
    history = EnergyHistory(60 * SECOND, 10**8)
    engines = ServingEngines(
        history,
        Pools().make(PoolName.ENGINES),
        merged=lambda part, into: None,
        released=lambda sender: None,
    )
    history.apply(_born(100, SERVER), ())
    engine = engines.find(SERVER, "llm", 100 * SECOND, ANN.path)
    helpers = frozenset(Consumer(1000 + number, 50 + number) for number in range(20))
    history.apply(_born(101, *helpers), ())
    engines.refresh(101 * SECOND)
    assert engine.members == {SERVER, *helpers}
    history.apply(Tick(_at(102), exits=tuple(helpers)), ())
    engines.refresh(102 * SECOND)
    assert engine.members == {SERVER, *helpers}
    history.apply(Tick(_at(200)), ())
    engines.refresh(200 * SECOND)
    assert engine.members == {SERVER}
