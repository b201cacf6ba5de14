"""Attacks of one user on another's figures, and the time until the other's spans have energy.

Run with three users (agent, attacker, victim), and with three containers of one user. The attacks
are those of `tests/flow/test_trust_between_users.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator

from testbed.hostile.judge import Rule
from testbed.hostile.schedule import Attack, Done, Terms
from testbed.hostile.stage import HostileStage
from testbed.program import UNPRIVILEGED
from testbed.spans.accuracy import quantile
from testbed.two_users import (
    CONTAINERS,
    JOB,
    SPANS,
    THREE_USERS,
    CgroupsOfTest,
    NoCgroupError,
    Outcome,
    Target,
    TwoUsers,
    two_users,
)
from testbed.user_attacks import ATTACKS as USER_ATTACKS
from testbed.user_attacks import UserAttack

SETTLED = 3.0  # seconds, for the 99th percentile of others' spans
LONGEST = 20.0  # seconds; later spans count as never settled
EVERY = 0.1  # seconds of a span, and of a request with one
SPANS_OF_RUN = 400


class TrustStage(HostileStage):
    """An agent without capabilities and with a tuned job; the other user is calmer."""

    def __init__(self) -> None:
        super().__init__(
            pace=0.5,
            within=UNPRIVILEGED,
            settings={"agent.interval": "100ms", "autotune.mode": "advise"},
            configuration=JOB,
        )

    @property
    def target(self) -> Target:
        tcp = self.tcp.removeprefix("tcp:")
        return Target(self.run, tcp, self.address(), self.host.directory)


def _attack(name: str, kind: str, attack: UserAttack) -> Attack:
    def run(stage: HostileStage, terms: Terms) -> Done:
        assert isinstance(stage, TrustStage)
        try:
            with CgroupsOfTest() as cgroups, two_users(stage.target, cgroups, kind) as users:
                found = attack(users)
        except NoCgroupError as error:
            return Done(note=f"not run: {error}", faults=["no containers can be made here"])
        except AssertionError as error:
            return Done(faults=[str(error)])
        return Done(note=found.note, faults=found.faults)

    return Attack(f"{name}, {kind}", "trust", run, Rule(), TrustStage)


# --------------------------------------------------------------------------------- settlement


def _settlement(*, announced: bool, attacked: bool) -> UserAttack:
    """The victim sends spans one by one; the attacker floods the agent meanwhile."""

    def attack(users: TwoUsers) -> Outcome:
        with _flooding(users) if attacked else contextlib.nullcontext():
            found = sorted(_delays(users, announced=announced))
        p99 = quantile(found, 0.99)
        note = f"p50 {quantile(found, 0.5):.2f} s, p99 {p99:.2f} s of {len(found)} spans"
        return Outcome(note, [f"{note}: more than {SETTLED:g} s"] if p99 > SETTLED else [])

    return attack


def _delays(users: TwoUsers, *, announced: bool) -> list[float]:
    """Seconds from the sending of each span to the metrics that count it."""
    victim, owner = users.victim, users.owners[1]
    counted = re.compile(rf'^{SPANS}{{[^}}]*owner="{re.escape(owner)}"[^}}]*}} (\S+)', re.MULTILINE)
    seen: list[tuple[float, float]] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            text = users.target.text()
            seen.append((time.monotonic(), sum(map(float, counted.findall(text)))))

    before = sum(map(float, counted.findall(users.target.text())))
    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    sent: list[float] = []
    try:
        for _ in range(SPANS_OF_RUN):
            id = os.urandom(8).hex()
            if announced:
                victim.announce([id])
            start = time.time_ns()
            victim.ask("burn", seconds=EVERY)
            victim.send([("step", start, time.time_ns(), id)], "victim")
            sent.append(time.monotonic())
        deadline = time.monotonic() + LONGEST
        while (not seen or seen[-1][1] < before + len(sent)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        stop.set()
        watcher.join()
    return [
        next((at - begun for at, count in seen if count >= before + number + 1), LONGEST)
        for number, begun in enumerate(sent)
    ]


@contextlib.contextmanager
def _flooding(users: TwoUsers) -> Iterator[None]:
    """The attacker announces 60,000 spans a second that never end, and sends claims."""
    stop = threading.Event()

    def flood() -> None:
        run_dir, claim = str(users.target.run_dir), {"process__pid": users.victim.pid}
        while not stop.wait(0.5):
            users.attacker.ask("flood", run_dir=run_dir, count=30_000)
            now = time.time_ns()
            spans = [("step", now - 10**8, now, os.urandom(8).hex()) for _ in range(50)]
            users.attacker.send(spans, "victim", **claim)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


SETTLEMENTS: dict[str, Callable[[TwoUsers], Outcome]] = {
    f"settling of {SPANS_OF_RUN} {how} spans {while_}": _settlement(
        announced=how == "announced", attacked=while_ == "under a flood"
    )
    for how in ("announced", "unannounced")
    for while_ in ("at rest", "under a flood")
}

ATTACKS = [
    _attack(name, kind, attack)
    for kind in (THREE_USERS, CONTAINERS)
    for name, attack in {**USER_ATTACKS, **SETTLEMENTS}.items()
]
