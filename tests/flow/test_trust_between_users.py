"""Three users of one machine: one attacks the spans of another, the third is the agent's.

The victim's GPU energy is booked to the victim's spans only, whatever the attacker claims,
announces, executes or names. Run with three uids, and with three containers of one uid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from support.program import UNPRIVILEGED, Running, host_of
from support.requirements import find_program
from support.span_senders import Scrape
from support.user_process import Told, UserProcess
from support.waiting import eventually
from wattspan.emulation.control import Closeable, ControlClient

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.alone,  # it measures energy
    pytest.mark.skipif(not find_program("setpriv"), reason="no setpriv; install util-linux"),
]

ATTACKER, VICTIM = 20_001, 20_002
LOADS = (0.9, 0.6, 0.9)
"""Load of the victim on its GPU in three spans; there is none at both ends."""
JOB = """
[[autotune.job]]
service = "trainer"
span = "train_step"
"""
CGROUPS = Path("/sys/fs/cgroup")
JOULES, SPANS = "wattspan_span_energy_joules_total", "wattspan_spans_total"


class CgroupsOfTest(Closeable):
    """Directories in the hierarchies of this host, removed at the end."""

    def __init__(self) -> None:
        known = [CGROUPS, CGROUPS / "unified", CGROUPS / "memory"]
        self._hierarchies = [one for one in known if (one / "cgroup.procs").exists()]
        self._made: list[Path] = []

    def make(self, name: str, owner: int = 0) -> list[Path]:
        """A directory in each hierarchy, which ``owner`` may use."""
        found = [one / name for one in self._hierarchies]
        for path in found:
            try:
                path.mkdir()
            except OSError as error:
                pytest.skip(f"no cgroup can be made here: {error}")
            self._made.append(path)
            os.chown(path, owner, owner)
            os.chown(path / "cgroup.procs", owner, owner)
        if not found:
            pytest.skip("no cgroups here")
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


class Life(NamedTuple):
    """GPU work of the victim, within three spans one after the other; times are Unix time."""

    edges: tuple[int, int, int, int]
    ids: tuple[str, str, str]
    joules: float
    """True energy of the board, which the victim has for itself."""

    @property
    def spans(self) -> list[Told]:
        return [
            ("train_step", start, end, id)
            for start, end, id in zip(self.edges, self.edges[1:], self.ids, strict=False)
        ]


class Machine(NamedTuple):
    """The agent, and one process each of the attacker and of the victim, which has a GPU."""

    agent: Running
    run_dir: Path
    tcp: str
    attacker: UserProcess
    victim: UserProcess
    owners: tuple[str, str]
    """The labels of attacker and victim."""
    container: str
    """The id of the victim's container."""

    def page(self) -> Scrape:
        return Scrape(self.agent.scrape("text/plain"))

    def work(self, attack: Callable[[Sequence[str]], None] = lambda _: None) -> Life:
        """The victim works; ``attack`` runs at its begin, and its spans are sent later."""
        ids = tuple(os.urandom(8).hex() for _ in range(3))
        attack(ids)
        edges, begun = [time.time_ns()], time.monotonic_ns()
        with ControlClient(host_of(self.agent.process.pid)) as host:
            for load in (0.0, *LOADS, 0.0):
                host.ask(do="load", gpu=0, pid=self.victim.pid, load=load)
                self.victim.ask("burn", seconds=1.5 if load else 0.2)
                edges.append(time.time_ns())
            before, after = host.ask(do="truth", at=[begun, time.monotonic_ns()])["at"]
        joules = (after["gpus"][0]["energy"] - before["gpus"][0]["energy"]) / 1e6
        first, _, *middle, _, last = edges
        return Life((first, *middle[:2], last), ids, joules)

    def judge(self, attack: Callable[[Life], None]) -> None:
        """The victim works and sends its spans; the joules are its own and nobody else's.

        ``attack`` is called before they are sent.
        """
        self.judged(self.work(), attack)

    def judged(self, life: Life, attack: Callable[[Life], None]) -> None:
        attacker, victim = self.owners
        before = self.page()
        attack(life)
        began = time.monotonic()
        assert self.victim.send(life.spans, "trainer") == 200
        after = self.settled(victim, before.total(SPANS, owner=victim) + 3)
        booked = [
            after.total(JOULES, hw_type="gpu", **labels)
            - before.total(JOULES, hw_type="gpu", **labels)
            for labels in ({"owner": victim, "service_name": "trainer"}, {})
        ]
        assert after.total(SPANS, owner=victim) == before.total(SPANS, owner=victim) + 3
        elsewhere, took = booked[1] - booked[0], time.monotonic() - began
        print(f"{booked[0]:.1f} of {life.joules:.1f} J, {elsewhere:.3f} elsewhere, {took:.2f} s")
        assert after.total(JOULES, hw_type="gpu", owner=attacker) == 0
        assert booked[1] == pytest.approx(booked[0], abs=1e-6)
        assert booked[0] >= 0.99 * life.joules

    def settled(self, owner: str, spans: float) -> Scrape:
        """The page on which so many spans of an owner have settled."""

        def found() -> Scrape | None:
            page = self.page()
            return page if page.total(SPANS, owner=owner) >= spans else None

        return eventually(found, f"{spans} spans of {owner!r} settle", within=20)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="wattspan-") as made:
        path = Path(made)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="module")
def cgroups() -> Iterator[CgroupsOfTest]:
    with CgroupsOfTest() as made:
        yield made


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Running]:
    """An agent without capabilities on an emulated host."""
    run_dir = folder / "run"
    run_dir.mkdir()
    configuration = folder / "config.toml"
    configuration.write_text(JOB)
    with Running(
        folder,
        f"--config={configuration}",
        emulate="two-socket-h100",
        within=UNPRIVILEGED,
        agent__run_dir=run_dir,
        agent__interval="100ms",
        autotune__mode="advise",
    ) as agent:
        yield agent.measuring()


@pytest.fixture(params=["three users", "containers of one user"])
def machine(
    request: pytest.FixtureRequest, agent: Running, folder: Path, cgroups: CgroupsOfTest
) -> Iterator[Machine]:
    """Attacker and victim are users, or containers of one user."""
    where: list[list[Path]] = [[], []]
    users = [ATTACKER, VICTIM]
    owners = [str(user) for user in users]
    container = "c0ffee" + os.urandom(29).hex()
    if request.param != "three users":
        where = [cgroups.container(), cgroups.container()]
        users = [VICTIM, VICTIM]
        ids = [one[0].name.removeprefix("docker-").removesuffix(".scope") for one in where]
        owners = [f"{VICTIM}/{id[:12]}" for id in ids]
        container = ids[1]
    run_dir = folder / "run"
    with (
        UserProcess(users[0], run_dir, where[0]) as attacker,
        UserProcess(users[1], run_dir, where[1]) as victim,
        ControlClient(host_of(agent.process.pid)) as host,
    ):
        host.ask(do="attach", gpu=0, pid=victim.pid, load=0.0)
        tcp = agent.spans_address().removeprefix("http://")
        machine = Machine(agent, run_dir, tcp, attacker, victim, (owners[0], owners[1]), container)
        yield machine


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_claimed_process_of_another_user_is_not_booked(machine: Machine, transport: str) -> None:
    to = "" if transport == "unix" else machine.tcp
    pid = machine.victim.pid
    born = datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC).isoformat()
    claims: list[dict[str, str | int]] = [
        {"process__pid": pid},
        {"process__pid": pid, "process__creation__time": born},
        {"process__pid": pid, "container__id": machine.container},
        {"container__id": machine.container},
    ]

    def attack(life: Life) -> None:
        for claim in claims:
            forged = [(name, start, end, os.urandom(8).hex()) for name, start, end, _ in life.spans]
            assert machine.attacker.send(forged, "trainer", to, **claim) == 200

    machine.judge(attack)


def test_announced_ids_of_another_user_leave_him_his_energy(machine: Machine) -> None:
    attacker = machine.attacker
    life = machine.work(attacker.announce)

    def attack(life: Life) -> None:
        attacker.announce([life.ids[0], life.ids[-1]])
        attacker.send([life.spans[0]], "attacker")

    machine.judged(life, attack)


def test_announced_ids_of_a_victim_that_announces_too_are_its_own(machine: Machine) -> None:
    def both(ids: Sequence[str]) -> None:
        machine.attacker.announce(ids)
        machine.victim.announce(ids)

    life = machine.work(both)
    machine.judged(life, lambda life: machine.attacker.announce(life.ids))


def test_setuid_program_gives_its_accomplice_no_rights_of_root(
    machine: Machine, folder: Path
) -> None:
    """The process that connected is root's afterwards; another process writes on its connection."""
    program = folder / "sleep"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o4755)
    attacker, otlp = machine.attacker, f"{machine.run_dir}/otlp.sock"
    ids = [os.urandom(8).hex() for _ in range(4)]
    with UserProcess(0, machine.run_dir) as of_root:
        start = time.time_ns()
        attacker.ask("connect", to=otlp)
        attacker.announce(ids[:2])
        attacker.ask("exec", program=str(program))
        eventually(
            lambda: Path(f"/proc/{attacker.pid}/comm").read_text() == "sleep\n", "the program runs"
        )
        of_root.ask("burn", seconds=0.5)

        def attack(_: Life) -> None:
            attacker.announce(ids[2:])
            end = time.time_ns()
            for id, claim in zip(ids, ({}, {"process__pid": of_root.pid}) * 2, strict=True):
                attacker.send([("stolen", start, end, id)], "stolen", **claim)

        machine.judge(attack)
        assert machine.page().total(JOULES, service_name="stolen") == 0


def test_passed_connection_carries_no_energy_to_its_opener(machine: Machine) -> None:
    attacker, victim, otlp = machine.attacker, machine.victim, f"{machine.run_dir}/otlp.sock"
    at = f"\0wattspan-passing-{attacker.pid}"
    victim.ask("wait_at", at=at)
    attacker.ask("connect", to=otlp)
    attacker.ask("give", to=otlp, at=at)
    victim.ask("take", to="passed")

    def attack(life: Life) -> None:
        for claim in ({}, {"process.pid": victim.pid}):
            spans = [(name, start, end, os.urandom(8).hex()) for name, start, end, _ in life.spans]
            victim.ask("send", to="passed", spans=spans, service="passed", resource=claim)

    machine.judge(attack)


def test_delegated_cgroup_joins_no_container_of_another_user(
    machine: Machine, cgroups: CgroupsOfTest
) -> None:
    delegated = cgroups.make(f"delegated-{os.urandom(4).hex()}", ATTACKER)
    forged = cgroups.make(f"{delegated[0].name}/docker-{machine.container}.scope", ATTACKER)
    with UserProcess(ATTACKER, machine.run_dir, forged) as claimant:
        claims: list[dict[str, str | int]] = [
            {"container__id": machine.container},
            {"container__id": machine.container, "process__pid": machine.victim.pid},
        ]
        claimant.ask("burn", seconds=0.5)

        def attack(life: Life) -> None:
            for claim in claims:
                spans = [
                    (name, start, end, os.urandom(8).hex()) for name, start, end, _ in life.spans
                ]
                claimant.send(spans, "trainer", **claim)

        machine.judge(attack)
        groups = machine.page().by("wattspan_group_energy_joules_total", "group")
        assert groups[f"{ATTACKER}/{machine.container[:12]}"] > 0
        if machine.victim.user == machine.attacker.user:
            assert groups[machine.container[:12]] > 0


def test_flood_of_announced_starts_leaves_another_user_his_energy(machine: Machine) -> None:
    def flood(ids: Sequence[str]) -> None:
        machine.attacker.announce(ids)
        for _ in range(3):
            machine.attacker.ask("flood", run_dir=str(machine.run_dir), count=40_000)
            machine.victim.ask("burn", seconds=0.2)

    def before_and_while(ids: Sequence[str]) -> None:
        flood(ids)
        machine.victim.announce(ids)

    life = machine.work(before_and_while)
    machine.judged(life, lambda life: flood(life.ids))
    assert machine.page().total("wattspan_spans_open") > 1_000
