"""Attacks of a user on another one, by spans, announcements, queries and floods."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from testbed.two_users import JOULES, SPANS, Life, Outcome, TwoUsers
from testbed.user_process import ATTACKER, Told, UserProcess
from testbed.waiting import eventually
from wattspan.emulation.control import ControlClient

Claim = dict[str, str | int]
UserAttack = Callable[[TwoUsers], Outcome]

ENGINES, ACCOUNTS, PRINCIPALS = 66, 64, 64
"""Two more than the agent has room for, and all that it has room for."""

# ------------------------------------------------------------------- claims and announcements


def claimed_processes(users: TwoUsers, to: str = "") -> Outcome:
    """The attacker's spans name the victim's process and container."""
    pid = users.victim.pid
    born = datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC).isoformat()
    claims: list[Claim] = [
        {"process__pid": pid},
        {"process__pid": pid, "process__creation__time": born},
        {"process__pid": pid, "container__id": users.container},
        {"container__id": users.container},
    ]

    def attack(life: Life) -> None:
        for claim in claims:
            assert users.attacker.send(life.forged(), "trainer", to, **claim) == 200

    return users.booked(users.work(), attack).outcome


def claimed_processes_over_tcp(users: TwoUsers) -> Outcome:
    return claimed_processes(users, users.target.tcp)


def announced_ids(users: TwoUsers) -> Outcome:
    """The attacker knows the victim's span ids, from a traceparent header or from exemplars."""
    attacker = users.attacker
    life = users.work(attacker.announce)

    def attack(life: Life) -> None:
        attacker.announce([life.ids[0], life.ids[-1]])
        attacker.send([life.spans[0]], "attacker")

    return users.booked(life, attack).outcome


def announced_id_of_a_batch(users: TwoUsers) -> Outcome:
    """One announced id of the middle, the first and the last span of a batch, in three batches."""
    found = []
    for place in range(3):
        life = users.work(lambda ids, place=place: users.attacker.announce([ids[place]]))  # type: ignore[misc]
        found.append(users.booked(life).outcome)
    return _together(found)


def announced_ids_of_both(users: TwoUsers) -> Outcome:
    def both(ids: Sequence[str]) -> None:
        users.attacker.announce(ids)
        users.victim.announce(ids)

    life = users.work(both)
    return users.booked(life, lambda life: users.attacker.announce(life.ids)).outcome


def passed_connection(users: TwoUsers) -> Outcome:
    """The victim's spans on a connection that the attacker opened are nobody's."""
    attacker, victim = users.attacker, users.victim
    at = f"\0wattspan-passing-{attacker.pid}"
    victim.ask("wait_at", at=at)
    attacker.ask("connect", to=attacker.otlp)
    attacker.ask("give", to=attacker.otlp, at=at)
    victim.ask("take", to="passed")

    def attack(life: Life) -> None:
        for claim in ({}, {"process.pid": victim.pid}):
            spans = life.forged()
            victim.ask("send", to="passed", spans=spans, service="passed", resource=claim)

    return users.booked(users.work(), attack).outcome


def setuid_program(users: TwoUsers) -> Outcome:
    """The process that connected is root's afterwards; another process writes on its connection."""
    program = users.target.run_dir.parent / f"sleep-{users.attacker.pid}"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o4755)
    attacker = users.attacker
    ids = [os.urandom(8).hex() for _ in range(4)]
    with UserProcess(0, users.target.run_dir) as of_root:
        start = time.time_ns()
        attacker.ask("connect", to=attacker.otlp)
        attacker.announce(ids[:2])
        attacker.ask("exec", program=str(program))
        name = Path(f"/proc/{attacker.pid}/comm")
        eventually(lambda: name.read_text().strip() == program.name[:15], "the program runs")
        of_root.ask("burn", seconds=0.5)

        def attack(_: Life) -> None:
            attacker.announce(ids[2:])
            end = time.time_ns()
            for id, claim in zip(ids, ({}, {"process__pid": of_root.pid}) * 2, strict=True):
                attacker.send([("stolen", start, end, id)], "stolen", **claim)

        return users.booked(users.work(), attack).outcome


def delegated_container(users: TwoUsers) -> Outcome:
    """A cgroup below the attacker's own directory is named as the victim's container."""
    return _delegated(users, f"docker-{users.container}.scope")


def delegated_job(users: TwoUsers) -> Outcome:
    """A cgroup below the attacker's own directory is named as a job of Slurm."""
    return _delegated(users, "slurm", "job_7")


def _delegated(users: TwoUsers, *names: str) -> Outcome:
    path = [f"delegated-{os.urandom(4).hex()}", *names]
    for depth in range(1, len(path) + 1):
        forged = users.cgroups.make("/".join(path[:depth]), ATTACKER)
    claims: list[Claim] = [
        {"container__id": users.container},
        {"container__id": users.container, "process__pid": users.victim.pid},
    ]
    with UserProcess(ATTACKER, users.target.run_dir, forged) as claimant:
        claimant.ask("burn", seconds=0.5)

        def attack(life: Life) -> None:
            for claim in claims:
                claimant.send(life.forged(), "trainer", **claim)

        booked = users.booked(users.work(), attack).outcome
        name = names[-1].removeprefix("docker-").removeprefix("job_").removesuffix(".scope")[:12]

        def groups() -> dict[str, float]:
            """The joules of all groups, once the attacker's work is among them."""
            claimant.ask("burn", seconds=0.5)
            found = users.target.page().by("wattspan_group_energy_joules_total", "group")
            return found if any(found.get(one) for one in (f"{ATTACKER}/{name}", name)) else {}

        found = eventually(groups, f"a group with the name {name}")
    faults = list(booked.faults)
    if f"{ATTACKER}/{name}" not in found:
        faults.append(f"the attacker's work is in the group {name}")
    return booked._replace(faults=faults)


# -------------------------------------------------------------------------------------- floods


def flood_of_starts(users: TwoUsers) -> Outcome:
    """120,000 announced spans at the begin of the victim's work, and again before its end."""

    def flood(ids: Sequence[str]) -> None:
        users.attacker.announce(ids)
        for _ in range(3):
            users.attacker.ask("flood", run_dir=str(users.target.run_dir), count=40_000)
            users.victim.ask("burn", seconds=0.2)

    def before_and_while(ids: Sequence[str]) -> None:
        flood(ids)
        users.victim.announce(ids)

    life = users.work(before_and_while)
    outcome = users.booked(life, lambda life: flood(life.ids)).outcome
    left = users.target.page().total("wattspan_spans_open")
    faults = [*outcome.faults, *(["no announced span is open"] if left <= 1_000 else [])]
    return Outcome(f"{outcome.note}, {left:,.0f} spans open", faults)


def minted_principals(users: TwoUsers) -> Outcome:
    """64 containers of the attacker's user flood starts, and send spans and model requests."""
    containers = [users.cgroups.container() for _ in range(PRINCIPALS)]
    run_dir = str(users.target.run_dir)
    now = time.time_ns()
    spans = [("minted", now - 10**8, now, f"{number:016x}") for number in range(1, 101)]
    with UserProcess(0, users.target.run_dir) as crowd:
        crowd.crowd(
            PRINCIPALS,
            ("flood", {"run_dir": run_dir, "count": 4_000}),
            ("send", _sent(crowd, spans)),
            ("send", _sent(crowd, spans[:1], attributes=model_request("minted"))),
            containers=containers,
        )
        life = users.work(users.victim.announce)
        return users.booked(life).outcome


def idle_senders(count: int) -> UserAttack:
    """So many processes of the attacker that sent one span each."""

    def attack(users: TwoUsers) -> Outcome:
        missed = "wattspan_agent_missed_ticks_total"
        now = time.time_ns()
        spans = [("idle", now - 10**8, now, os.urandom(8).hex())]
        sent = ("send", _sent(users.attacker, spans))
        users.attacker.crowd(count, sent)
        before = users.target.page().total(missed)
        outcome = users.booked(users.work(users.victim.announce)).outcome
        ticks = users.target.page().total(missed) - before
        return outcome._replace(note=f"{outcome.note}, {ticks:.0f} ticks missed")

    return attack


def _sent(
    sender: UserProcess, spans: Sequence[Told], attributes: Mapping[str, Any] | None = None
) -> Mapping[str, object]:
    """The arguments of a question that sends spans of a crowd."""
    return {
        "to": sender.otlp,
        "spans": spans,
        "service": "crowd",
        "resource": {},
        "attributes": attributes or {},
    }


# --------------------------------------------------------------------------- language models


def model_request(model: str, tokens: int = 100) -> dict[str, str | int]:
    """The attributes of a request to a language model."""
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": tokens,
        "gen_ai.usage.output_tokens": tokens,
    }


def many_engines(users: TwoUsers) -> Outcome:
    """66 processes of the attacker send requests to language models, as engines would."""
    now = time.time_ns()
    spans = [("chat", now - 10**8, now, os.urandom(8).hex())]
    sent = _sent(users.attacker, spans, attributes=model_request("attacker's"))
    users.attacker.crowd(ENGINES, ("send", sent))
    return _served(users)


def many_accounts(users: TwoUsers) -> Outcome:
    """The attacker sends requests to 64 models."""
    now = time.time_ns()
    for number in range(ACCOUNTS):
        spans = [("chat", now - 10**8, now, os.urandom(8).hex())]
        attributes = model_request(f"model {number}")
        users.attacker.send(spans, "many models", attributes=attributes)
    return _served(users)


def _served(users: TwoUsers) -> Outcome:
    """The victim's server has a row, with the energy of its requests."""
    owner, model = users.owners[1], f"model of {users.victim.pid}"
    with serving(users) as spans:
        users.victim.send(spans, "server", attributes=model_request(model))

    def row() -> float:
        page = users.target.page()
        return page.total("wattspan_gen_ai_token_energy_joules_total", model=model, owner=owner)

    try:
        joules = eventually(row, "the energy of the victim's requests", within=90)
    except AssertionError as error:
        return Outcome("", [str(error)])
    return Outcome(f"the victim's server has its row, of {joules:,.0f} J")


@contextmanager
def serving(users: TwoUsers, requests: int = 5) -> Iterator[list[Told]]:
    """The spans of requests, one after the other, in which the victim uses its GPU."""
    spans = []
    with ControlClient(users.target.host) as host:
        for _ in range(requests):
            start = time.time_ns()
            host.ask(do="load", gpu=0, pid=users.victim.pid, load=0.8)
            users.victim.ask("burn", seconds=0.5)
            spans.append(("chat", start, time.time_ns(), os.urandom(8).hex()))
        host.ask(do="load", gpu=0, pid=users.victim.pid, load=0.0)
    yield spans


# --------------------------------------------------------------------------------- steered jobs


def forged_units(users: TwoUsers) -> Outcome:
    """The attacker sends units of work with the names of the victim's tuned job."""
    attacker, victim = users.attacker, users.victim
    steps, forged = 40, 400
    before = _units(users)
    with ControlClient(users.target.host) as host:
        host.ask(do="load", gpu=0, pid=victim.pid, load=0.9)
        for number in range(steps):
            start = time.time_ns()
            victim.ask("burn", seconds=0.1)
            end = time.time_ns()
            victim.send([("train_step", start, end, os.urandom(8).hex())], "trainer")
            short = (end - start) // (forged // steps)
            spans = [
                ("train_step", start + n * short, start + (n + 1) * short, os.urandom(8).hex())
                for n in range(forged // steps)
            ]
            claim = {"process__pid": victim.pid} if number % 2 else {}
            attacker.send(spans, "trainer", **claim)
        host.ask(do="load", gpu=0, pid=victim.pid, load=0.0)

    def risen() -> dict[str, float]:
        return {job: units - before.get(job, 0.0) for job, units in _units(users).items()}

    half = steps / 2  # the first ones show that there is a job
    try:
        eventually(lambda: max(risen().values()) >= half, "units of the victim's job", within=20)
    except AssertionError as error:
        return Outcome("", [f"{error}: {risen()}"])
    users.settled(users.owners[1], steps)
    units = max(risen().values())
    note = f"{units:.0f} units of {steps} steps of the victim, and of {forged} forged ones"
    return Outcome(note, [f"a job has {note}"] if units > steps else [])


def _units(users: TwoUsers) -> dict[str, float]:
    return users.target.page().by("wattspan_autotune_units_total", "job")


def forged_recurring_runs(users: TwoUsers) -> Outcome:
    """The attacker reports and forgets runs of the victim's recurring job, by name and number."""
    attacker, victim = users.attacker, users.victim
    job = f"nightly-{victim.pid}"
    terms = {
        "batch_sizes": [16, 32],
        "default_batch_size": 32,
        "target_metric": 0.8,
        "higher_is_better_metric": True,
        "max_epochs": 10,
    }
    own: dict[str, object] = {"job": job, "gpus": "board", "terms": terms}
    status, run = victim.query("/v1/recurring/next", own)
    assert status == 200, run
    forged = {"energy_joules": 1.0, "seconds": 1.0, "power_watts": 1.0, "epochs": 1}
    answers = [
        attacker.query(
            "/v1/recurring/report", {"run": run["run"], "outcome": "converged", **forged}
        ),
        attacker.query("/v1/recurring/next", own),
        attacker.query("/v1/recurring/forget", {"job": job}),
    ]
    status, jobs = victim.query("/v1/recurring/status?" + urlencode({"job": job}))
    faults = []
    if answers[0][0] != 404:
        faults.append(f"the report of the victim's run got {answers[0]}")
    (found,) = jobs["jobs"] if status == 200 else ({},)
    if (found.get("runs", 0), found.get("running")) != (1, 1):
        faults.append(f"the victim's job has changed: {jobs}")
    return Outcome("the report of the victim's run is refused, and the run goes on", faults)


# ------------------------------------------------------------------------------------ a secret

BITS, HALF, WINDOW = 20, 0.2, 0.07
"""A bit is told by work in the first or in the second half; the windows are in their middle."""


def secret(users: TwoUsers) -> Outcome:
    """The attacker reads the energy of windows of 70 ms, by ``api.sock`` and by spans."""
    draw = random.Random(users.victim.pid)
    bits = [draw.random() < 0.5 for _ in range(BITS)]
    windows: list[tuple[int, int]] = []
    for bit in bits:
        for works in (bit, not bit):
            start = time.time_ns()
            users.victim.ask("burn" if works else "rest", seconds=HALF)
            middle = (start + time.time_ns()) // 2
            windows.append((middle - round(WINDOW * 5e8), middle + round(WINDOW * 5e8)))
    own = {"pid": users.victim.pid}
    faults, told = [], []
    with UserProcess(0, users.target.run_dir) as root:
        known = [_energy(root, window, own) for window in windows]
    right, _ = _guessed(bits, known)
    if right < BITS - 2:
        faults.append(f"root itself reads {right} of {BITS} bits: the attack shows nothing")
    for name, joules in {
        "process": [_energy(users.attacker, window, own) for window in windows],
        "devices": [_energy(users.attacker, window, {}) for window in windows],
        "spans": _by_spans(users, windows, ""),
        "spans over TCP": _by_spans(users, windows, users.target.tcp),
    }.items():
        right, decided = _guessed(bits, joules)
        told.append(f"{name} {right} of {decided}")
        if right > 16:  # of 20 guessed bits, 17 are right in one of 800 cases
            faults.append(f"{right} of {BITS} bits are read by {name}")
        if name != "devices" and decided:
            faults.append(f"{decided} windows of another's process are readable by {name}")
    return Outcome(f"bits right of bits decided: {', '.join(told)}", faults)


def _energy(reader: UserProcess, window: tuple[int, int], of: Mapping[str, int]) -> float | None:
    """CPU joules of a window for a reader; None if it is refused or unknown."""
    start, end = window
    query = urlencode({**of, "start": start, "end": end, "wait": "3s"})
    status, answer = reader.query(f"/v1/energy?{query}")
    if status != 200:
        return None
    if of:
        found: float | None = answer["process"]["joules"].get("cpu")
        return found
    packages = [one["joules"] for one in answer["devices"] if one["hw_type"] == "cpu"]
    return None if None in packages else sum(packages)


def _by_spans(users: TwoUsers, windows: Sequence[tuple[int, int]], to: str) -> list[float | None]:
    """The energy of spans of the windows that claim the victim's process, by their names."""
    attacker, service = users.attacker, f"reader {to} {users.attacker.pid}"
    for number, (start, end) in enumerate(windows):
        span = (f"w{number}", start, end, os.urandom(8).hex())
        attacker.send([span], service, to, process__pid=users.victim.pid)
    # A span of the attacker's own that settles after all of them.
    settled = users.target.page().total(SPANS, owner=users.owners[0]) + 1
    now = time.time_ns()
    attacker.send([("own", now - 10**8, now, os.urandom(8).hex())], service)
    page = users.settled(users.owners[0], settled)
    return [
        page.total(JOULES, service_name=service, span_name=f"w{number}", hw_type="cpu") or None
        for number in range(len(windows))
    ]


def _guessed(bits: Sequence[bool], joules: Sequence[float | None]) -> tuple[int, int]:
    """The right bits, and those that differences between two windows decide."""
    right = decided = 0
    for bit, first, second in zip(bits, joules[::2], joules[1::2], strict=True):
        if first is not None and second is not None and abs(first - second) > 1e-4:
            decided += 1
            right += (first > second) is bit
    return right, decided


def _together(found: Sequence[Outcome]) -> Outcome:
    return Outcome("; ".join(one.note for one in found), [f for one in found for f in one.faults])


ATTACKS: dict[str, UserAttack] = {
    "claims of pid and container.id": claimed_processes,
    "claims of pid and container.id, TCP": claimed_processes_over_tcp,
    "announced ids of a victim": announced_ids,
    "one announced id of a batch": announced_id_of_a_batch,
    "announced ids of a victim that announces": announced_ids_of_both,
    "connection passed to the victim": passed_connection,
    "exec of a setuid program": setuid_program,
    "delegated cgroup docker-<id>.scope": delegated_container,
    "delegated cgroup slurm/job_7": delegated_job,
    "120,000 announced starts": flood_of_starts,
    "64 minted containers": minted_principals,
    "600 idle senders": idle_senders(600),
    "3,000 idle senders": idle_senders(3_000),
    "66 engines": many_engines,
    "64 accounts of models": many_accounts,
    "forged units of a tuned job": forged_units,
    "forged recurring runs": forged_recurring_runs,
    "20-bit secret through windows of 70 ms": secret,
}
