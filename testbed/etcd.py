"""Real etcd clusters on loopback, with directories of their own: members that stop and hang."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Self

import msgspec

from testbed.network import Network
from testbed.requirements import find_program
from testbed.reserved_port import reserved_port
from testbed.waiting import eventually
from wattspan.clock import SystemClock
from wattspan.config import FleetSettings
from wattspan.emulation.control import Closeable
from wattspan.fleet.coordination import CoordinationError
from wattspan.fleet.etcd import EtcdCoordination, EtcdGateway
from wattspan.model import SECOND

HEARTBEAT_MS, ELECTION_MS = 50, 300


class EtcdCluster(Closeable):
    """Some members, which end with the context. ``tls`` are the options of client TLS.

    ``defaults`` are FleetSettings', of all clients.
    With a ``network``, each member runs at the place of its number, else all run on loopback.
    """

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        *,
        tls: Sequence[str] = (),
        network: Network | None = None,
        **defaults: object,
    ) -> None:
        self.defaults = defaults
        self._folder, self._tls, self._network = folder, tuple(tls), network
        self._ports = ExitStack()
        scheme = "https" if tls else "http"
        self.urls = [f"{scheme}://{self._listener(number, 2379)}" for number in range(members)]
        self._peers = [f"http://{self._listener(number, 2380)}" for number in range(members)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members
        self._clients: list[EtcdCoordination] = []

    def _listener(self, member: int, port: int) -> str:
        if self._network is not None:
            return f"{self._network.address(member)}:{port}"
        return f"127.0.0.1:{self._ports.enter_context(reserved_port())}"

    def start(self, member: int) -> None:
        cluster = ",".join(f"m{number}={url}" for number, url in enumerate(self._peers))
        program = find_program("etcd")
        assert program is not None
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    *(() if self._network is None else self._network.command(member)),
                    program,
                    f"--name=m{member}",
                    f"--data-dir={self._folder / f'm{member}'}",
                    f"--listen-client-urls={self.urls[member]}",
                    f"--advertise-client-urls={self.urls[member]}",
                    f"--listen-peer-urls={self._peers[member]}",
                    f"--initial-advertise-peer-urls={self._peers[member]}",
                    f"--initial-cluster={cluster}",
                    f"--heartbeat-interval={HEARTBEAT_MS}",
                    f"--election-timeout={ELECTION_MS}",
                    "--logger=zap",
                    "--log-level=error",
                    *self._tls,
                ],
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pids(self) -> list[int]:
        """The processes of the members that run."""
        return [process.pid for process in self._processes if process is not None]

    def kill(self, member: int) -> None:
        """End a member without notice; ``start`` continues it."""
        process = self._processes[member]
        if process is not None:
            process.kill()
            process.wait()
            self._processes[member] = None

    def hang(self, member: int) -> None:
        self._signal(member, signal.SIGSTOP)

    def resume(self, member: int) -> None:
        self._signal(member, signal.SIGCONT)

    def _signal(self, member: int, number: int) -> None:
        process = self._processes[member]
        process.send_signal(number)

    def settings(self, **options: object) -> FleetSettings:
        usual = {"endpoints": tuple(self.urls), "timeout": 20 * SECOND, "contact": 80 * SECOND}
        return FleetSettings(**(usual | self.defaults | options))

    def client(self, **options: object) -> EtcdCoordination:
        """A client that ends with the cluster; ``options`` are FleetSettings'."""
        client = EtcdCoordination(self.settings(**options), SystemClock())
        self._clients.append(client)
        return client

    def call(self, path: str, request: object, **options: object) -> object:
        """Call the gateway."""
        with closing(EtcdGateway(self.settings(**options), SystemClock())) as gateway:
            return gateway.call(path, request, object)

    def compact(self) -> None:
        """Forget the history of all keys."""
        state = self.client().read("")
        self.call("/v3/kv/compaction", {"revision": str(state.revision), "physical": True})

    def leader(self) -> int:
        """The member that leads."""
        for number in range(len(self.urls)):
            with suppress(CoordinationError):
                status = self.call(
                    "/v3/maintenance/status",
                    {},
                    endpoints=(self.urls[number],),
                    timeout=2 * SECOND,
                )
                ids = msgspec.convert(status, _Status)
                if ids.leader == ids.header.member_id:
                    return number
        raise AssertionError("no member leads")

    def enable_authentication(self, users: dict[str, str], prefix: str) -> None:
        """Add users by name with passwords; the first is root, the others write ``prefix``."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        permission = {"permType": "READWRITE", "key": prefix.encode(), "range_end": end.encode()}
        self.call("/v3/auth/role/add", {"name": "root"})
        self.call("/v3/auth/role/add", {"name": "fleet"})
        self.call("/v3/auth/role/grant", {"name": "fleet", "perm": permission})
        for number, (name, password) in enumerate(users.items()):
            self.call("/v3/auth/user/add", {"name": name, "password": password})
            role = "fleet" if number else "root"
            self.call("/v3/auth/user/grant", {"user": name, "role": role})
        self.call("/v3/auth/enable", {})

    def __enter__(self) -> Self:
        for member in range(len(self.urls)):
            self.start(member)
        if not self._tls or self.defaults:
            eventually(self._is_ready, "etcd answers")
        return self

    def _is_ready(self) -> bool:
        with suppress(CoordinationError):
            self.client(timeout=2 * SECOND).read("")
            return True
        assert any(one is not None and one.poll() is None for one in self._processes), self.logs()
        return False

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in self._folder.glob("*.log"))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for member in range(len(self.urls)):
            self.kill(member)
        self._ports.close()


class _Header(msgspec.Struct):
    member_id: str


class _Status(msgspec.Struct):
    header: _Header
    leader: str = ""
