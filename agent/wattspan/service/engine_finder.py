"""The finder of serving engines' processes: whom the agent believes that it is an engine.

Any user of this host may listen at the port of an engine that does not run. A figure is believed,
and a token is sent, only if the kernel shows that the other end of the very connection belongs to
the engine: to a process of the service whose processes use a GPU, or to the unit, container, pod or
pid that the operator names. Root may stand in for those, as the proxy of a published port does.
Without rights to see the descriptors of other users, as the packaged agent runs, the kernel shows
the principal of the other end only: its single program on GPUs is the engine, or the named one if
it has the same principal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from wattspan.config import ServingEngineSettings
from wattspan.http.sockets import Peer
from wattspan.ingest.identity_verification import SenderResolver
from wattspan.ingest.process_lookups import LookupBudget, RequestLookup, Sender
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    GroupKind,
    Payer,
    PayerInfo,
    Principal,
    Trouble,
)
from wattspan.ports import Clock, ProcessDirectory
from wattspan.processes.inspector import ProcessInspector
from wattspan.processes.metadata import starts_others
from wattspan.processes.principals import owner_label
from wattspan.service.energy_history import EnergyHistory
from wattspan.sharing.pools import Pools

ACCEPTANCE = SECOND // 4
"""The longest wait for the acceptance of a connection."""

_NAMED = frozenset({GroupKind.UNIT, GroupKind.CONTAINER, GroupKind.POD})
_LOOK_EVERY = 5 * MILLISECOND


class ScrapeError(Exception):
    """No figure of an engine is known: the cause as a clause, and the remedy."""

    def __init__(self, cause: str, remedy: str, trouble: Trouble = Trouble.DENIED) -> None:
        super().__init__(cause)
        self.remedy, self.trouble = remedy, trouble


class SeveralProgramsError(ScrapeError):
    """The energy of earlier readings may be that of another program than the engine."""


class EngineProcesses(NamedTuple):
    """The process that answers, the processes that use its GPUs, and the label of its owner."""

    listener: Consumer | None
    members: frozenset[Payer]
    owner: str


class EngineFinder:
    """Finds the processes of engines. For one thread; ``listeners`` is common to all engines."""

    def __init__(
        self,
        settings: ServingEngineSettings,
        clock: Clock,
        history: EnergyHistory,
        directory: ProcessDirectory,
        kernel: ProcessInspector,
        listeners: dict[Consumer, str],
        pools: Pools | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._history, self._directory, self._listeners = history, directory, listeners
        self._request = RequestLookup(kernel)
        self._senders = SenderResolver(self._request, LookupBudget(clock), pools or Pools())
        self._last: int | None = None  # the pid that answered last

    def find(self, ends: tuple[tuple[str, int], tuple[str, int]] | None) -> EngineProcesses:
        """The processes of the engine at the other end of our connection; ScrapeError."""
        sender = Sender(None, None)
        if ends is not None and self._is_accepted(*ends):
            self._request.forget()
            peer = Peer(address=ends[1], local=ends[0])
            sender = self._senders.resolve(peer, self._last, self._clock.now())
        if ends is None or sender.principal is None:
            cause = "the kernel shows no process of this network namespace behind the connection"
            raise ScrapeError(cause, "Name an address or published port of this host in `url`.")
        who = owner_label(sender.principal)
        listener = None if sender.process is None else sender.process.consumer
        self._last = None if listener is None else listener.pid
        if listener is None and self._settings.token_file and not self._is_proven(*ends):
            cause = "the kernel shows only the user that listens there, perhaps in a container"
            remedy = "Grant the agent CAP_SYS_PTRACE, or use the unified cgroup hierarchy."
            raise ScrapeError(cause, remedy)
        if self._settings.process:
            return self._named(sender, listener)
        if listener is None:
            if sender.principal.is_host_root:
                cause = "root listens there, perhaps for the port of a container"
                raise ScrapeError(cause, "Name the engine's unit, container or pid in `process`.")
            return EngineProcesses(None, self._of_principal(sender.principal, who), who)
        self._register((listener,))
        found = self._history.service_group(listener, dict(self._listeners)).members
        if self._history.gpu_users().isdisjoint(found):
            cause = f"the service of process {listener.pid} of {who}, which listens there, has used"
            remedy = "Wait for its first request, or name its unit or container in `process`."
            raise ScrapeError(f"{cause} no GPU", remedy, Trouble.ABSENT)
        return EngineProcesses(listener, found, who)

    def _is_accepted(self, end: tuple[str, int], other: tuple[str, int]) -> bool:
        """True once a process has accepted the connection, which has no owner before."""
        until = self._clock.monotonic() + ACCEPTANCE
        while self._request.owner_of(other, end) is None:
            if (now := self._clock.monotonic()) >= until:
                return False
            self._clock.sleep_until(now + _LOOK_EVERY)
        return True

    def _is_proven(self, end: tuple[str, int], other: tuple[str, int]) -> bool:
        """True if the kernel shows the cgroup at the other end: a user may be in any container."""
        owner = self._request.owner_of(other, end)
        return owner is not None and self._request.socket_principal(owner) is not None

    def _of_principal(self, principal: Principal, who: str) -> frozenset[Payer]:
        """The only program of a principal on GPUs, where the rights do not show its listener."""
        users = {one: self._describe(one) for one in self._history.gpu_users()}
        parents = {
            one.pid: info.parent or 0
            for one, info in users.items()
            if isinstance(one, Consumer) and info is not None and info.principal == principal
        }
        roots = [parent for parent in parents.values() if parent not in parents]
        found = frozenset(one for one in users if isinstance(one, Consumer) and one.pid in parents)
        remedy = "Name the engine's unit, container or pid in `process`."
        if not found:
            raise ScrapeError(f"{who} listens there and has none on GPUs", remedy)
        if len(roots) > 1 and not self._is_launcher(roots, principal):
            cause = f"{who} listens there and has several programs on GPUs"
            raise SeveralProgramsError(cause, remedy)
        others = {self._listeners.get(one, self._settings.label) for one in found}
        if others != {self._settings.label}:
            cause = f"{who} has one program on GPUs for {' and '.join(sorted(others))}"
            raise ScrapeError(cause, "Name the unit, container or pid of each in `process`.")
        self._register(found)
        return found

    def _is_launcher(self, parents: Sequence[int], principal: Principal) -> bool:
        """True for one parent that is no shell or service manager: workers of one engine."""
        above = self._directory.identify(parents[0]) if len(set(parents)) == 1 else None
        info = None if above is None else self._describe(above)
        if info is None or info.principal != principal:
            return False
        return not (info.starts_others or starts_others(info.command))

    def _register(self, processes: Iterable[Consumer]) -> None:
        """Note the processes of this engine, for the others."""
        for other, label in tuple(self._listeners.items()):
            if label == self._settings.label:
                del self._listeners[other]
        self._listeners.update(dict.fromkeys(processes, self._settings.label))

    def _describe(self, payer: Payer) -> PayerInfo | None:
        return self._directory.describe(payer) if isinstance(payer, Consumer) else None

    def _named(self, sender: Sender, listener: Consumer | None) -> EngineProcesses:
        """The processes that the operator names, if one of them or root of this host listens."""
        name, users = self._settings.process, self._history.gpu_users()
        name = name[:12] if len(name) == 64 and name.isalnum() else name  # the id of a container
        found: frozenset[Payer] = frozenset(one for one in users if self._is_in(one, name))
        if name.isdecimal() and (root := self._directory.identify(int(name))) is not None:
            found = self._history.service_group(root).members
        if users.isdisjoint(found):
            remedy = "Correct `process`: a pid, or the name of a systemd unit, container or pod."
            raise ScrapeError(f"no process of {name!r} uses a GPU", remedy, Trouble.ABSENT)
        infos = [info for one in found if (info := self._describe(one)) is not None]
        owners = {info.principal for info in infos if info.principal is not None}
        inside = sender.principal in owners
        if listener is not None:
            inside = listener in found or self._is_in(listener, name)
        if not inside and not (sender.principal and sender.principal.is_host_root):
            cause = f"{owner_label(sender.principal)} listens there, and no process of {name!r}"
            raise ScrapeError(cause, "Correct `url` or `process`.")
        # Any of its API servers may have answered, all with the same counters.
        return EngineProcesses(None, found, min(map(owner_label, owners), default=""))

    def _is_in(self, payer: Payer, name: str) -> bool:
        info = self._describe(payer)
        groups = () if info is None else info.groups
        return any(group.name == name and group.kind in _NAMED for group in groups)
