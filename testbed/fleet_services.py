"""Coordination services of a simulated fleet: in memory or a real etcd, metered and disturbed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from testbed.etcd import EtcdCluster
from testbed.memory_cluster import MemoryCluster
from wattspan.fleet.coordination import (
    Changes,
    Coordination,
    KeyWrite,
    OutcomeUnknownError,
    PrefixState,
    RevisionCondition,
    UnreachableError,
)
from wattspan.testing import ManualClock


class MeteredService:
    """A service whose calls and written bytes are counted, and which may be gone.

    ``open_client`` makes a connection, ``committed`` is called after each commit, and
    ``cpu_seconds`` returns the CPU time of the service's processes.
    """

    def __init__(
        self,
        open_client: Callable[[], Coordination],
        committed: Callable[[], None] = lambda: None,
        cpu_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.open_client, self.committed, self.cpu_seconds = open_client, committed, cpu_seconds
        self.calls: Counter[str] = Counter()
        self.bytes_written = 0
        self.is_gone = False
        self.watchers: dict[str, Callable[[], None]] = {}
        """Called after each write of a key."""

    def client(self) -> MeteredClient:
        return MeteredClient(self)


class MeteredClient:
    """A host's connection; while it is ``deaf``, commits are made and their answers are lost."""

    def __init__(self, service: MeteredService) -> None:
        self._service, self._client = service, service.open_client()
        self.connected, self.deaf = True, False

    def read(self, prefix: str) -> PrefixState:
        return self._counted("read").read(prefix)

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        revision = self._counted("commit").commit(writes, conditions)
        self._service.committed()
        for write in writes:
            if write.value is not None:
                self._service.bytes_written += len(write.value)
                if notify := self._service.watchers.get(write.key):
                    notify()
        if self.deaf:
            raise OutcomeUnknownError("The answer is lost.")
        return revision

    def grant(self, seconds: int) -> int:
        return self._counted("grant").grant(seconds)

    def renew(self, lease: int) -> None:
        self._counted("renew").renew(lease)

    def revoke(self, lease: int) -> None:
        self._counted("revoke").revoke(lease)

    def watch(self, prefix: str, after: int) -> Changes:
        return self._counted("watch").watch(prefix, after)

    def close(self) -> None:
        self.connected = False
        self._client.close()

    def _counted(self, call: str) -> Coordination:
        if self._service.is_gone or not self.connected:
            raise UnreachableError("No endpoint answers.")
        self._service.calls[call] += 1
        return self._client


@contextmanager
def memory_service(clock: ManualClock) -> Iterator[MeteredService]:
    cluster = MemoryCluster(clock)
    # Nobody watches, and former books would fill the memory.
    yield MeteredService(cluster.client, committed=cluster.compact)


@contextmanager
def etcd_service(members: int) -> Iterator[MeteredService]:
    """A real etcd cluster on loopback, whose data lie in memory."""
    with (
        TemporaryDirectory(dir="/dev/shm") as folder,
        EtcdCluster(Path(folder), members) as cluster,
    ):
        processes = [psutil.Process(pid) for pid in cluster.pids]

        def cpu_seconds() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        yield MeteredService(cluster.client, cpu_seconds=cpu_seconds)
