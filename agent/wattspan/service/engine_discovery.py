"""The serving engines of this host, for a person who wants to configure them.

Only listeners of this network namespace are asked whose service has a process with an open GPU, as
far as the rights of the caller show it, and only for pages that reading does not empty: processes
of TensorRT-LLM are known by their program or libraries. A listener on a port that the kernel has
assigned, as those between the ranks of a training job, is asked only if a command line of its
service names an engine: an unexpected request may fail the job.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from wattspan.clock import SystemClock
from wattspan.inference.engine_metrics import (
    MAX_BODY,
    PAGES,
    OtherPageError,
    PageError,
    page_paths,
    read_page,
)
from wattspan.model import SECOND, Consumer
from wattspan.ports import Clock
from wattspan.processes.inspector import ProcessInspector, TcpListener, listening_sockets
from wattspan.processes.metadata import starts_others
from wattspan.service.process_families import ProcessFamilies
from wattspan.util.http_get import OK, FetchError, KeptConnection

TIMEOUT = 2.0
"""Seconds for a connection, and for an answer."""

_MAX_LISTENERS = 16
"""Listeners of one service that are asked."""

_LASTS = 60 * SECOND
"""Time after which no more listeners are asked."""

_MAX_DESCRIPTORS = 1 << 16
_MAX_MAPS = 8 << 20
_NEEDS_TOKEN = frozenset({401, 403})
_GPU = re.compile(r"/(nvidia[0-9]+|dri/renderD[0-9]+|kfd|accel/accel[0-9]+)")
_DRAINS = re.compile(rb"tensorrt_llm|trtllm")
_PROGRAMS = (
    ("ollama", "ollama"),
    ("llama-server", "llama.cpp"),
    ("trtllm", "tensorrt-llm"),
    ("tensorrt_llm", "tensorrt-llm"),
    ("sglang", "sglang"),
    ("text-generation", "tgi"),
    ("dynamo", "dynamo"),
    ("vllm", "vllm"),
)
"""Parts of command lines, and the engines that they show."""


class FoundEngine(NamedTuple):
    """An engine whose page was read, and the pid of the process that listens."""

    url: str
    kind: str
    pid: int
    models: frozenset[str]


class LeftOut(NamedTuple):
    """A listener, or several, that is not configured: the cause as a clause, and the remedy."""

    where: str
    cause: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.cause}. {self.remedy}".strip()


class Discovery(NamedTuple):
    """The engines of this host, and what was not asked or is none."""

    engines: tuple[FoundEngine, ...]
    left_out: tuple[LeftOut, ...]


class _Process(NamedTuple):
    consumer: Consumer
    namespace: str  # of its network
    uses_gpu: bool
    sockets: frozenset[int]  # inodes


class _Listener(NamedTuple):
    host: str
    port: int
    inode: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EngineDiscovery:
    """Searches the processes below one procfs root once."""

    def __init__(
        self,
        root: Path = Path("/proc"),
        devices: Path = Path("/dev"),
        assigned: range | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``assigned`` are the kernel's ports for sockets without one; None: those of procfs."""
        self._assigned = _assigned_ports(root) if assigned is None else assigned
        self._clock = clock or SystemClock()
        self._root, self._devices = root, str(devices)
        self._kernel = ProcessInspector(root)
        self._families = ProcessFamilies(0)
        self._processes: dict[Consumer, _Process] = {}

    def run(self) -> Discovery:
        """Ask the listeners whose services use GPUs."""
        with closing(self._kernel):
            self._read_processes()
        gpu_users = frozenset(one.consumer for one in self._processes.values() if one.uses_gpu)
        own = _link(f"{self._root}/self/ns/net")
        engines, left_out = list[FoundEngine](), list[LeftOut]()
        unused, hidden, omitted = list[str](), list[str](), list[str]()
        asked, until = Counter[frozenset[Consumer]](), self._clock.monotonic() + _LASTS
        for listener in self._listeners("self"):
            holders = [one for one in self._processes.values() if listener.inode in one.sockets]
            services = (self._service(one.consumer, gpu_users) for one in sorted(holders))
            members = next(filter(None, services), frozenset[Consumer]())
            if not holders:
                hidden.append(str(listener.port))
            elif not members:
                unused.append(str(listener.port))
            elif asked[members] == _MAX_LISTENERS or self._clock.monotonic() >= until:
                omitted.append(str(listener.port))
            else:
                asked[members] += 1
                found = self._ask(listener, min(holders).consumer.pid, members)
                if isinstance(found, FoundEngine):
                    engines.append(found)
                else:
                    left_out.append(found)
        if omitted:
            cause = (
                f"only {_MAX_LISTENERS} listeners of a service are asked, for {_LASTS // SECOND} s"
            )
            left_out.append(LeftOut(_ports(omitted), cause, "Read /metrics of them yourself."))
        left_out += self._in_other_namespaces(own)
        if unused:
            left_out.append(LeftOut(_ports(unused), "its processes have no GPU open"))
        if hidden:
            cause = "its processes are those of other users, or hidden"
            left_out.append(
                LeftOut(
                    _ports(hidden),
                    cause,
                    "Run this as root in the pid namespace of the host to ask them.",
                )
            )
        return Discovery(tuple(engines), tuple(left_out))

    # ----------------------------------------------------------------------------- processes

    def _read_processes(self) -> None:
        for pid in self._kernel.pids():
            found = self._kernel.look(pid)
            if found is None or found.kernel:
                continue
            groups = (self._kernel.cgroup(pid) or "",)
            self._families.add(
                found.consumer,
                found.parent,
                principal=found.principal,
                groups=groups,
                starts_others=starts_others(found.name),
            )
            sockets, uses_gpu = set[int](), False
            for target in self._descriptors(pid):
                if target.startswith("socket:["):
                    sockets.add(int(target[8:-1]))
                elif target.startswith(self._devices):
                    uses_gpu |= _GPU.fullmatch(target[len(self._devices) :]) is not None
            namespace = _link(f"{self._root}/{pid}/ns/net")
            self._processes[found.consumer] = _Process(
                found.consumer, namespace, uses_gpu, frozenset(sockets)
            )

    def _descriptors(self, pid: int) -> Iterator[str]:
        """The targets of the open descriptors of a process; none of another user's."""
        with suppress(OSError), os.scandir(f"{self._root}/{pid}/fd") as entries:
            for entry in islice(entries, _MAX_DESCRIPTORS):
                yield _link(entry.path)

    def _service(self, listener: Consumer, gpu_users: Collection[Consumer]) -> frozenset[Consumer]:
        """The processes of a listener's service; none unless one of them uses a GPU."""
        found = self._families.service(listener, gpu_users).members
        members = frozenset(one for one in found if isinstance(one, Consumer))
        return frozenset() if members.isdisjoint(gpu_users) else members

    def _listeners(self, process: str) -> list[_Listener]:
        """The listeners in the network namespace of a process."""
        found: dict[str, _Listener] = {}
        for one in map(_listener, listening_sockets(Path(self._root, process, "net"))):
            found.setdefault(one.address, one)
        return sorted(found.values(), key=lambda one: one.port)

    def _in_other_namespaces(self, own: str) -> Iterator[LeftOut]:
        """The users of GPUs in the network namespaces of containers."""
        seen = {own, ""}
        for one in sorted(self._processes.values()):
            if not one.uses_gpu or one.namespace in seen:
                continue
            seen.add(one.namespace)
            pid = one.consumer.pid
            ports = [str(each.port) for each in self._listeners(str(pid))]
            if ports:
                yield LeftOut(
                    _ports(ports),
                    f"it is in the network namespace of process {pid}, which has a GPU open",
                    "Name its published port in `url`, and its container in `process`.",
                )

    # ------------------------------------------------------------------------------- asking

    def _ask(
        self, listener: _Listener, pid: int, members: Collection[Consumer]
    ) -> FoundEngine | LeftOut:
        where, lines = f"port {listener.port} (process {pid})", b""
        drains = False
        for member in sorted(members):
            line = self._kernel.command_line(member.pid) or b""
            lines += line
            drains = drains or self._drains(member.pid, line)
        kind = next((name for part, name in _PROGRAMS if part.encode() in lines), "")
        if not kind and listener.port in self._assigned:
            cause = "the kernel has assigned its port, and no command line names an engine"
            return LeftOut(where, cause, "If it is an engine, read its /metrics yourself.")
        cause = "it has no page at /metrics"
        for path in page_paths("tensorrt-llm" if drains else "vllm"):
            connection = KeptConnection(listener.host, listener.port)
            try:
                connection.open(TIMEOUT)
                answer = connection.get(path, timeout=TIMEOUT, most=MAX_BODY, headers={})
                if answer.status in _NEEDS_TOKEN:
                    remedy = "Name a `token_file`, and its unit or container in `process`."
                    return LeftOut(where, f"it answers {answer.status} at {path}", remedy)
                if answer.status == OK:
                    page = read_page(answer.body)
                    url = f"http://{listener.address}"
                    return FoundEngine(url, page.page.kind, pid, page.models)
                cause = f"it answers {answer.status} at {path}"
            except FetchError as error:
                return LeftOut(where, f"it does not answer by HTTP ({error})")
            except OtherPageError:
                cause = f"it has no Prometheus page at {path}"
            except PageError as error:
                cause = f"its page at {path} is no engine's: {error}"
            finally:
                connection.close()
        return LeftOut(where, cause, _switch(kind))

    def _drains(self, pid: int, line: bytes) -> bool:
        """True if a page of the process may be emptied when it is read, or if that is unknown."""
        if _DRAINS.search(line):
            return True
        try:
            with Path(f"{self._root}/{pid}/maps").open("rb") as maps:
                return _DRAINS.search(maps.read(_MAX_MAPS)) is not None
        except OSError:
            return True


def _assigned_ports(root: Path) -> range:
    """The ports that the kernel assigns; its default if it does not tell."""
    try:
        text = (root / "sys/net/ipv4/ip_local_port_range").read_text("ascii")
        first, last = map(int, text.split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999
    return range(first, last + 1)


def _switch(kind: str) -> str:
    """How the page of an engine is switched on."""
    if kind == "ollama":
        return "Ollama has none: have its requests sent as spans."
    switch = next((one.switch for one in PAGES if one.kind == kind), "default")
    if switch == "default":
        return "If it is an engine, switch its metrics on."
    return f"Start {kind} with {switch}."


def _ports(ports: Collection[str]) -> str:
    return f"port{'s' if len(ports) > 1 else ''} {', '.join(dict.fromkeys(ports))}"


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - a bare string
    except OSError:
        return ""


def _listener(found: TcpListener) -> _Listener:
    """A listener at an address to connect to."""
    address, port, owner = found
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    host = "127.0.0.1" if address.is_unspecified else str(address)
    return _Listener(host, port, owner.inode)


def fragment(engine: FoundEngine) -> str:
    """The configuration of an engine, as TOML."""
    models = f", {', '.join(sorted(engine.models))}" if engine.models else ""
    comment = "".join(one if one.isprintable() else "?" for one in f"{engine.pid}{models}")
    return "\n".join(
        (
            f"# process {comment}",
            "[[serving.engine]]",
            f'url = "{engine.url}"',
            f'kind = "{engine.kind}"',
        )
    )
