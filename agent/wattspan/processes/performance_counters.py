"""Performance counters of processes: the helper that reads them, and its client in the agent.

The helper (``wattspan counters``) holds CAP_BPF and CAP_PERFMON, with which a process can read the
kernel's memory, so that the agent needs neither. systemd starts one for each connection. It runs
the program of :mod:`wattspan.processes.cpu_socket_times` with perf events of every CPU while the
connection lasts, and passes sums only. Without systemd, as in a pod, it listens itself
(:mod:`~wattspan.processes.counters_server`).

Each byte that the agent sends is a request. The answer is a `_HEADER` and a body: an error in
UTF-8, or the sums since the last answer, as 64-bit words of this machine: all pairs of a process
and a socket, and then for each pair nanoseconds and the count of each event.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from operator import add, is_, sub
from pathlib import Path
from typing import NamedTuple, Protocol

from wattspan.model import MILLISECOND, SECOND, Consumer, Counts, Failure, Payer, Trouble, Usage
from wattspan.ports import Clock
from wattspan.processes.cpu_socket_division import HOST_RESOURCE, SOCKET_MASK, SocketTimesSample
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.processes.ebpf import PerfEvent
from wattspan.processes.procfs import ProcFs
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.text import printable
from wattspan.util.throttle import RetryBackoff
from wattspan.util.unix_sockets import peer_credentials

SOCKET_PATH = Path("/run/wattspan-counters/counters.sock")

HARDWARE_EVENTS: Sequence[PerfEvent] = ((0, 0), (0, 9), (0, 1), (0, 3))
"""The kernel's generic events cpu-cycles, ref-cycles, instructions and cache-misses.

The last one is of the last level of cache on Intel; AMD and ARM map it to another level.
"""

OFFERED_EVENTS = HARDWARE_EVENTS, ((0, 0), (1, 0), (0, 1), (0, 3))
"""The events by preference: for ref-cycles, which not every CPU has, the nanoseconds of cpu-clock,
which are as constant."""

_WORDS = len(Counts._fields)
_ROW = 8 * (1 + _WORDS)  # bytes of a pair and its values
_HEADER = struct.Struct("=II")  # kind, bytes of the body
_SUMS, _ERROR = range(2)
MAX_BODY = 8 << 20
"""Bytes of an answer, for 170,000 pairs; a table of the program holds 16 for each CPU."""


# --------------------------------------------------------------------------------------- helper

IDLE_TIMEOUT = 180.0
"""Seconds without a request, or in which an answer is not read, after which a helper ends.

An agent asks once in a minute at least: its longest interval.
"""


def open_program(events: Iterable[Sequence[PerfEvent]]) -> SocketTimes:
    """Count the first ones of ``events`` that the CPUs have. OSError."""
    topology, cause = CpuTopology(), ""
    for some in events:
        try:
            return SocketTimes(topology, topology.possible, events=some)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP):
                raise
            cause = str(error.strerror)
    raise OSError(errno.ENOENT, f"the CPUs or the kernel do not offer them ({cause})")


class SumsProgram(Protocol):
    """Counts from its opening on."""

    def sums(self) -> bytes:
        """The body of an answer."""

    def close(self) -> None: ...


def serve_sums(
    connection: socket.socket,
    permitted: Collection[int],
    opener: Callable[[], SumsProgram],
    timeout: float = IDLE_TIMEOUT,
) -> str:
    """Answer the agent at the other end until it has ended; returns the error that it was told.

    ``permitted`` are the uids that may ask.
    """
    connection.settimeout(timeout)
    try:
        if (uid := peer_credentials(connection).uid) not in permitted:
            raise PermissionError(errno.EPERM, f"user {uid} may not read performance counters")
        with closing(opener()) as program:
            while connection.recv(1):
                body = program.sums()
                connection.sendall(_HEADER.pack(_SUMS, len(body)) + body)
    except (TimeoutError, ConnectionError):
        return ""
    except OSError as error:
        told = error.strerror or str(error)
        with suppress(OSError):
            connection.sendall(_HEADER.pack(_ERROR, len(told.encode())) + told.encode())
        return told
    return ""


# ---------------------------------------------------------------------------------------- sums


class CounterSums(NamedTuple):
    """Sums of ``pairs`` of a process and a socket, each ``pid << 32 | socket``.

    ``words`` has, for each pair, the fields of a :class:`Counts`.
    """

    pairs: Sequence[int] = ()
    words: Sequence[int] = ()

    @staticmethod
    def decoded(body: bytes) -> CounterSums:
        """The sums in the body of an answer. ValueError."""
        count, rest = divmod(len(body), _ROW)
        if rest:
            raise ValueError("its answer has half a row")
        words = memoryview(body).cast("Q").tolist()
        return CounterSums(words[:count], words[count:])

    @property
    def times(self) -> SocketTimesSample:
        return SocketTimesSample(self.pairs, self.words[::_WORDS])

    def by_payer(
        self, usages: Iterable[Usage], accounts: Mapping[int, int]
    ) -> dict[str, dict[Payer, Sequence[int]]]:
        """The sums of the payers of ``usages`` by resource; pids in ``accounts`` count for others.

        A pid that several payers have had is left out: its work may be of any of them. So is work
        without a cycle, by counters that do not count.
        """
        spent = set().union(*(one.spent for one in usages if one.resource == HOST_RESOURCE))
        payers: dict[int, Payer | None] = {}
        for payer in spent:
            if isinstance(payer, Consumer):
                payers[payer.pid] = None if payer.pid in payers else payer
        found: dict[str, dict[Payer, Sequence[int]]] = {}
        for at, pair in enumerate(self.pairs):
            pid = pair >> 32
            owner = payers.get(accounts.get(pid, pid))
            words = self.words[at * _WORDS : (at + 1) * _WORDS]
            if owner is None or not all(words[:3]):  # time, cycles, reference
                continue
            for resource in (HOST_RESOURCE, f"{HOST_RESOURCE}:{pair & SOCKET_MASK}"):
                mine = found.setdefault(resource, {})
                before = mine.get(owner)
                mine[owner] = [*map(add, before, words)] if before else words
        return found


def add_counts(
    usages: Sequence[Usage], sums: CounterSums, accounts: Mapping[int, int]
) -> list[Usage]:
    """The usages of one settlement with its ``sums``, divided by the time of each payer.

    A payer without time has no counts. Nothing is counted twice.
    """
    found = sums.by_payer(usages, accounts)
    spent: dict[str, list[Mapping[Payer, int]]] = {}
    for usage in usages:
        spent.setdefault(usage.resource, []).append(usage.spent)
    divided: dict[str, Sequence[dict[Payer, Counts]]] = {}
    for resource, amounts in spent.items():
        mine, host = found.get(resource, {}), divided.get(HOST_RESOURCE)
        # The only socket of a host has what the host has.
        same = mine == found.get(HOST_RESOURCE) and all(map(is_, amounts, spent[HOST_RESOURCE]))
        divided[resource] = host if host and same else _divided(mine, amounts)
    parts = {resource: iter(counts) for resource, counts in divided.items()}
    return [replace(usage, counts=next(parts[usage.resource])) for usage in usages]


def _divided(
    found: Mapping[Payer, Sequence[int]], spent: Sequence[Mapping[Payer, int]]
) -> Sequence[dict[Payer, Counts]]:
    """The part of each of ``spent`` in the sums of the payers."""
    counts: list[dict[Payer, Counts]] = [{} for _ in spent]
    for payer, words in found.items():
        amounts = [one.get(payer, 0) for one in spent]
        whole, end = sum(amounts), 0
        before: Sequence[int] = [0] * _WORDS
        for part, amount in zip(counts, amounts, strict=True):
            if amount > 0:
                end += amount
                edge = words if end == whole else [word * end // whole for word in words]
                part[payer] = Counts(*map(sub, edge, before))
                before = edge
    return counts


# --------------------------------------------------------------------------------------- client

ANSWER_TIMEOUT, HUNG_AFTER = 20 * MILLISECOND, 30 * SECOND
"""The time in which an answer counts, and after which the helper is given up."""

FIRST_DELAY, MAX_DELAY = SECOND, 600 * SECOND


class ProcessCounters(Protocol):
    """Counts what each process does on each socket."""

    failures: tuple[Failure, ...]
    """The present failure, or none."""

    def request(self) -> None:
        """Ask for the sums since the last request."""

    def sample(self) -> CounterSums | None:
        """The sums that have been asked for; None if they are unknown."""

    def close(self) -> None: ...


class CountersClient:
    """Asks the helper behind a socket; without that socket there are no sums, and no failure.

    A late answer is of another period and is not used, and the next one begins with that: neither
    is of the period between two requests. The first one is late: a helper starts.

    The helper knows processes by their pids ``of_kernel``, or by those that the agent sees.
    """

    def __init__(
        self,
        clock: Clock,
        path: Path = SOCKET_PATH,
        patience: int = ANSWER_TIMEOUT,
        *,
        of_kernel: bool = True,
    ) -> None:
        self._clock, self._path, self._patience = clock, path, patience
        self._of_kernel = of_kernel
        self._backoff = RetryBackoff(FIRST_DELAY, MAX_DELAY)
        self._connection: socket.socket | None = None
        self._asked: int | None = None  # the time of a request without an answer
        self._late = False
        self._since_request = True  # the sums that are asked for
        self._received = bytearray()
        self.failures: tuple[Failure, ...] = ()

    def request(self) -> None:
        """Ask, unless an answer is outstanding."""
        now = self._clock.monotonic()
        self._late = self._asked is not None
        if self._late or not (self._connection or self._backoff.is_due(now)):
            return
        try:
            if self._connection is None:
                self._connection = self._connected()
            self._connection.send(b"?")
            self._asked = now
        except FileNotFoundError:
            self.failures = ()  # the helper is not installed any more
        except OSError as error:
            self._fail(error)

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        if self._of_kernel and ProcFs().is_namespaced():
            connection.close()
            raise OSError(errno.ENODEV, "a pid namespace has other pids than the kernel")
        return connection

    def sample(self) -> CounterSums | None:
        if self._asked is None or self._connection is None:
            return None
        try:
            body = self._receive(self._connection, 0 if self._late else self._patience)
            if body is None:
                if self._clock.monotonic() - self._asked > HUNG_AFTER:
                    self._fail(TimeoutError("it does not answer"))
                return None
            sums = CounterSums.decoded(body)
        except (OSError, ValueError) as error:
            self._fail(error)
            return None
        self._asked, self.failures = None, ()
        self._backoff.reset()
        usable, self._since_request = self._since_request, not self._late
        return sums if usable and not self._late else None

    def _receive(self, connection: socket.socket, patience: int) -> bytes | None:
        """The body of the answer; None if it is not there within ``patience``. OSError."""
        deadline = self._clock.monotonic() + patience
        while True:
            connection.settimeout(max(0, deadline - self._clock.monotonic()) / SECOND)
            try:
                part = connection.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                return None
            if not part:
                raise ConnectionError("it has ended")
            self._received += part
            if len(self._received) < _HEADER.size:
                continue
            kind, length = _HEADER.unpack_from(self._received)
            if kind > _ERROR or length > MAX_BODY or len(self._received) > _HEADER.size + length:
                raise ValueError("its answer is no answer of a helper")
            if len(self._received) == _HEADER.size + length:
                body = bytes(self._received[_HEADER.size :])
                self._received.clear()
                if kind == _ERROR:
                    raise OSError(body[:400].decode(errors="replace"))
                return body

    def _fail(self, error: Exception) -> None:
        self.close()
        self._backoff.failed(self._clock.monotonic())
        cause = printable(getattr(error, "strerror", None) or str(error))
        failure = Failure(
            "processes",
            f"performance counters by the helper at {self._path}",
            Trouble.DENIED if isinstance(error, PermissionError) else Trouble.RETRY,
            cause[:1].lower() + cause[1:],
            "See `journalctl -u 'wattspan-counters@*'`, or set [processes] counters to off.",
        )
        self.failures = (failure,)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._asked = None
        self._since_request = True
        self._received.clear()
