"""The processes of engines for language models."""

from __future__ import annotations

from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Share,
    Tick,
)
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


def _begun() -> tuple[EnergyHistory, ServingEngines]:
    history = EnergyHistory(60 * SECOND, 10**8)
    engines = ServingEngines(
        history,
        Pools().make(PoolName.ENGINES),
        merged=lambda part, into: None,
        released=lambda sender: None,
    )
    return history, engines


def test_ended_processes_of_an_engine_are_forgotten_with_the_history() -> None:
    history, engines = _begun()
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


def test_process_that_is_parted_from_an_engine_is_in_one_engine_only() -> None:
    history, engines = _begun()
    launcher, worker, helper = Consumer(9, 1), Consumer(11, 2), Consumer(12, 3)
    parents = {launcher: 1, SERVER: launcher.pid, worker: launcher.pid, helper: SERVER.pid}
    gpu = Domain("gpu-0", HwType.GPU, "gpu-0", "fake", Provenance.EMULATED, resource="gpu-0")
    births = [
        PayerInfo(one, "python", parent=parent, principal=ANN) for one, parent in parents.items()
    ]
    history.apply(Tick(_at(100), domains={"fake": [gpu]}, births=births), ())
    energy, none = Microjoules(9), Microjoules(0)
    interval = Interval(gpu.id, _at(100), _at(101), energy)
    used = Attribution(interval, (Share(worker, energy),), none, none)
    history.apply(Tick(_at(101)), [used])
    engine = engines.find(SERVER, "llm", 101 * SECOND, ANN.path)
    engine.serves = True
    engines.refresh(101 * SECOND)
    assert engine.members == {launcher, SERVER, worker, helper}
    history.apply(Tick(_at(102), exits=(worker,)), ())
    history.apply(Tick(_at(200)), ())

    other = engines.find(helper, "app", 200 * SECOND, ANN.path)
    assert other is not engine
    assert helper in other.members
    assert engine.members.isdisjoint(other.members)
