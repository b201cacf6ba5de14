"""The serving engines that send spans, and the processes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from wattspan.model import Consumer, Payer
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.process_families import ServiceProcesses
from wattspan.sharing.fair_pool import FairPool, SharePath
from wattspan.spans.values import TokenRole


@dataclass(slots=True, eq=False)
class Engine:
    """The processes of an engine.

    ``launcher`` is the process above the sender whose family they are, None for none, and
    ``related`` are further senders of its requests with their services. Spans of a role above
    ``widest`` are calls of other services.
    """

    sender: Consumer
    service: str
    owner: SharePath
    members: frozenset[Payer]
    launcher: Consumer | None = None
    related: dict[Consumer, str] = field(default_factory=dict)
    boards: set[str] = field(default_factory=set)
    since: float = inf  # the start of its first request
    widest: TokenRole = TokenRole.CLIENT
    serves: bool = False  # True once a request was not a client's

    @property
    def parts(self) -> list[tuple[str, SharePath]]:
        """Its owner's parts of its boards."""
        return [(board, self.owner) for board in self.boards]


class ServingEngines(Mapping[Consumer, Engine]):
    """Engines by their sender, in places of a ``pool``. For one thread.

    ``merged`` is called before an engine becomes a part of another one, and ``released`` with the
    sender of an engine that has gone.
    """

    def __init__(
        self,
        history: EnergyHistory,
        pool: FairPool[Consumer],
        *,
        merged: Callable[[Engine, Engine], None],
        released: Callable[[Consumer], None],
    ) -> None:
        self._history, self._places = history, pool
        self._merged, self._released = merged, released
        self._engines: dict[Consumer, Engine] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self._engines)

    def __getitem__(self, sender: Consumer) -> Engine:
        return self._engines[sender]

    def of(self, sender: Consumer) -> Engine | None:
        """The engine that a process belongs to; None for none."""
        if sender in self._engines:
            return self._engines[sender]
        return next((one for one in self._engines.values() if sender in one.members), None)

    def find(self, sender: Consumer, service: str, now: int, owner: SharePath) -> Engine | None:
        """The engine of a sender of requests, perhaps a new one; None for want of room."""
        engine = self.of(sender)
        if engine is None or not self._belongs(sender, service, engine):
            admission = self._places.admit(sender, owner, now)
            for displaced in admission.displaced:
                self._release(displaced)
            if not admission:
                return None
            engine = self._engines[sender] = Engine(sender, service, owner, frozenset((sender,)))
            self._find_members(engine)
        self._places.touch(engine.sender, now)
        return engine

    def refresh(self, now: int) -> list[Engine]:
        """Find new processes, release engines without requests; returns those that got a GPU."""
        for expired in self._places.expire(now):
            self._release(expired)
        found = []
        for engine in tuple(self._engines.values()):
            if engine.sender not in self._engines:
                continue  # it became a part of another one
            had_gpu = bool(engine.boards) or self._history.uses_gpu(engine.members)
            self._find_members(engine)
            if not had_gpu and self._history.uses_gpu(engine.members):
                found.append(engine)
        return found

    def _belongs(self, sender: Consumer, service: str, engine: Engine) -> bool:
        """True if a process of an engine sends its requests; else they are parted.

        Below one launcher are related senders only: of others nobody knows whose the GPU is. An
        unrelated sender in the same container has its own family.
        """
        if sender == engine.sender or sender in engine.related:
            return True
        engine.related[sender] = service
        found = self._service(engine)
        if engine.launcher is None and sender not in found.apart:
            return True
        if engine.launcher is not None and found.launcher is not None:
            return True
        del engine.related[sender]
        if engine.launcher is not None:
            self._part(engine)
        else:
            engine.members -= found.apart
            engine.boards.clear()
        engine.members -= {sender}
        return False

    def _service(self, engine: Engine) -> ServiceProcesses:
        """The service of an engine's sender, apart from the senders of other services."""
        senders = {sender: one.service for sender, one in self._engines.items()}
        for one in self._engines.values():
            senders |= one.related
        return self._history.service_group(engine.sender, senders, launched=engine.serves)

    def _find_members(self, engine: Engine) -> None:
        """Find the processes of an engine that no other engine has."""
        found = self._service(engine)
        if found.launcher is not None:
            engine.launcher = found.launcher
            for other in self._engines.keys() & found.members - {engine.sender}:
                self._merge(self._engines[other], engine)
        elif engine.launcher is not None:
            self._part(engine)
        others = (each for each in self._engines.values() if each is not engine)
        # Workers that have exited remain while their energy may not have settled.
        former = self._history.known(engine.members) - found.apart
        living = self._history.known(engine.related)
        engine.related = {one: name for one, name in engine.related.items() if one in living}
        engine.members = former | found.members.difference(*(each.members for each in others))

    def _merge(self, part: Engine, into: Engine) -> None:
        """Make the engine of a related sender a part of another one."""
        self._merged(part, into)
        into.members |= part.members
        into.since = min(into.since, part.since)
        into.related |= {part.sender: part.service, **part.related}
        into.boards |= part.boards
        self._places.remove(part.sender)
        del self._engines[part.sender]

    def _part(self, engine: Engine) -> None:
        """Take the family of its launcher from an engine: it has unrelated senders, or no GPU."""
        own = self._history.service_group(engine.sender, launched=False)
        others = (each.members for each in self._engines.values() if each is not engine)
        engine.launcher, engine.members = None, own.members.difference(*others)
        engine.boards.clear()

    def _release(self, sender: Consumer) -> None:
        del self._engines[sender]
        self._released(sender)
