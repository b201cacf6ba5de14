"""Two users of one machine with an agent, or two containers of one user: attacker and victim.

The victim has a board of the agent's emulated host. Its energy is the victim's, whatever the
attacker claims, announces, executes or names.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from testbed.span_senders import Scrape
from testbed.user_process import ATTACKER, VICTIM, Told, UserProcess
from testbed.waiting import eventually
from wattspan.emulation.control import Closeable, ControlClient

THREE_USERS, CONTAINERS = "three users", "containers of one user"
"""The agent, the attacker and the victim are users; or attacker and victim containers of one."""

LOADS = (0.9, 0.6, 0.9)
"""Load of the victim on its GPU in three spans; there is none at both ends."""
WORK = 1.5  # seconds of each of these spans

CGROUPS = Path("/sys/fs/cgroup")
JOULES, SPANS = "wattspan_span_energy_joules_total", "wattspan_spans_total"
OWN_PART = 0.99
"""The least part of the victim's energy that is booked to the victim's spans."""

JOB = """
[[autotune.job]]
service = "trainer"
span = "train_step"
kind = "steps"
"""
"""The part of the agent's configuration that tunes the victim's work."""


class NoCgroupError(Exception):
    """No directory can be made in the hierarchies of this host."""


class CgroupsOfTest(Closeable):
    """Directories in the hierarchies of this host, removed at the end."""

    def __init__(self) -> None:
        known = [CGROUPS, CGROUPS / "unified", CGROUPS / "memory"]
        self._hierarchies = [one for one in known if (one / "cgroup.procs").exists()]
        self._made: list[Path] = []

    def make(self, name: str, owner: int = 0) -> list[Path]:
        """A directory in each hierarchy, which ``owner`` may use; NoCgroupError without any."""
        found = [one / name for one in self._hierarchies]
        for path in found:
            try:
                path.mkdir()
            except OSError as error:
                raise NoCgroupError(str(error)) from None
            self._made.append(path)
            os.chown(path, owner, owner)
            os.chown(path / "cgroup.procs", owner, owner)
        if not found:
            raise NoCgroupError("no cgroups are mounted")
        return found

    def container(self) -> list[Path]:
        """Directories as a runtime makes them for a container."""
        return self.make(f"docker-{os.urandom(32).hex()}.scope")

    def close(self) -> None:
        for path in reversed(self._made):

            def removed(path: Path = path) -> bool:  # shortly after the exit of its last process
                with contextlib.suppress(FileNotFoundError):
                    for below in path.glob("*/"):
                        below.rmdir()
                    path.rmdir()
                return not path.exists()

            def gone(path: Path = path) -> bool:
                with contextlib.suppress(OSError):
                    return removed(path)
                return False

            eventually(gone, f"{path} is empty")
        self._made.clear()


class Target(NamedTuple):
    """The attacked agent: its sockets, its addresses, and the directory of its emulated host."""

    run_dir: Path
    tcp: str
    """HOST:PORT of OTLP over HTTP."""
    metrics: str
    """The URL of the metrics."""
    host: Path

    def page(self) -> Scrape:
        return Scrape(self.text())

    def knows_idle_power(self) -> bool:
        """True if the idle power of all boards is known: else it is booked to their users."""
        page = self.page()
        watts = page.by("wattspan_idle_power_watts", "hw_id")
        return {one for one in page.by("hw_energy_joules_total", "hw_id") if "gpu" in one} <= set(
            watts
        )

    def text(self) -> str:
        with urllib.request.urlopen(self.metrics, timeout=30) as answer:
            return str(answer.read().decode())


class Life(NamedTuple):
    """GPU work of the victim, within three spans one after the other; times are Unix time."""

    edges: tuple[int, int, int, int]
    ids: tuple[str, str, str]
    joules: float
    """True energy of the victim's work on the board, which it has for itself."""

    @property
    def spans(self) -> list[Told]:
        return [
            ("train_step", start, end, id)
            for start, end, id in zip(self.edges, self.edges[1:], self.ids, strict=False)
        ]

    def forged(self) -> list[Told]:
        """Spans of the same names and times with ids of their own."""
        return [(name, start, end, os.urandom(8).hex()) for name, start, end, _ in self.spans]


class Outcome(NamedTuple):
    """The figures of an attack, and the promises that it broke."""

    note: str
    faults: Sequence[str] = ()


class Booked(NamedTuple):
    """Joules of the victim's work on its board: true ones, and those booked to spans, by owner."""

    true: float
    own: float
    stolen: float
    elsewhere: float
    seconds: float
    """From the sending of the victim's spans to their energy in the metrics."""

    @property
    def outcome(self) -> Outcome:
        note = (
            f"{100 * self.own / self.true:.1f} % of {self.true:,.0f} J to the victim, "
            f"{self.stolen:.0f} J to the attacker, settled in {self.seconds:.1f} s"
        )
        found = {
            f"{self.stolen:.3f} J are the attacker's": self.stolen != 0,
            f"{self.elsewhere:.3f} J are other spans'": abs(self.elsewhere) > 1e-6,
            f"{self.own:.1f} of {self.true:.1f} J are the victim's": self.own
            < OWN_PART * self.true,
        }
        return Outcome(note, [fault for fault, broken in found.items() if broken])


class TwoUsers(NamedTuple):
    """The agent, and one process each of the attacker and of the victim, which has a GPU."""

    target: Target
    attacker: UserProcess
    victim: UserProcess
    owners: tuple[str, str]
    """The labels of attacker and victim."""
    container: str
    """The id of the victim's container."""
    cgroups: CgroupsOfTest

    def work(self, attack: Callable[[Sequence[str]], None] = lambda _: None) -> Life:
        """The victim works; ``attack`` runs at its begin, and its spans are sent later."""
        ids = tuple(os.urandom(8).hex() for _ in range(3))
        attack(ids)
        edges, begun = [time.time_ns()], time.monotonic_ns()
        with ControlClient(self.target.host) as host:
            for load in (0.0, *LOADS, 0.0):
                host.ask(do="load", gpu=0, pid=self.victim.pid, load=load)
                self.victim.ask("burn", seconds=WORK if load else 0.2)
                edges.append(time.time_ns())
            before, after = host.ask(do="truth", at=[begun, time.monotonic_ns()])["at"]
        joules = (_of_process(after, self.victim.pid) - _of_process(before, self.victim.pid)) / 1e6
        first, _, *middle, _, last = edges
        return Life((first, *middle[:2], last), ids, joules)

    def booked(self, life: Life, attack: Callable[[Life], None] = lambda _: None) -> Booked:
        """The energies of a life's spans, which are sent after ``attack``."""
        attacker, victim = self.owners
        page = self.target.page
        before = page()
        attack(life)
        began = time.monotonic()
        assert self.victim.send(life.spans, "trainer") == 200
        spans = before.total(SPANS, owner=victim) + len(life.spans)
        after = self.settled(victim, spans)
        seconds = time.monotonic() - began
        assert after.total(SPANS, owner=victim) == spans
        own, others, whole = (
            after.total(JOULES, hw_type="gpu", **labels)
            - before.total(JOULES, hw_type="gpu", **labels)
            for labels in (
                {"owner": victim, "service_name": "trainer"},
                {"owner": attacker},
                {},
            )
        )
        stolen = after.total(JOULES, hw_type="gpu", owner=attacker)
        return Booked(life.joules, own, stolen, whole - own - others, seconds)

    def settled(self, owner: str, spans: float) -> Scrape:
        """The page on which so many spans of an owner have settled."""

        def found() -> Scrape | None:
            page = self.target.page()
            return page if page.total(SPANS, owner=owner) >= spans else None

        return eventually(found, f"{spans} spans of {owner!r} settle", within=20)


def _of_process(moment: dict[str, Any], pid: int) -> int:
    """True microjoules of the work of a process on the board until a moment."""
    return int(moment["gpus"][0]["processes"].get(str(pid), 0))


@contextmanager
def two_users(target: Target, cgroups: CgroupsOfTest, kind: str) -> Iterator[TwoUsers]:
    """Processes of attacker and victim; NoCgroupError if containers cannot be made."""
    eventually(target.knows_idle_power, "the idle power of the boards is known")
    where: list[list[Path]] = [[], []]
    users = [ATTACKER, VICTIM]
    owners = [str(user) for user in users]
    container = "c0ffee" + os.urandom(29).hex()
    if kind == CONTAINERS:
        where = [cgroups.container(), cgroups.container()]
        users = [ATTACKER, ATTACKER]
        ids = [one[0].name.removeprefix("docker-").removesuffix(".scope") for one in where]
        owners = [f"{ATTACKER}/{id[:12]}" for id in ids]
        container = ids[1]
    with (
        UserProcess(users[0], target.run_dir, where[0]) as attacker,
        UserProcess(users[1], target.run_dir, where[1]) as victim,
        ControlClient(target.host) as host,
    ):
        host.ask(do="attach", gpu=0, pid=victim.pid, load=0.0)
        yield TwoUsers(target, attacker, victim, (owners[0], owners[1]), container, cgroups)
