"""Attacks on the capper: abuse of its socket, kills, devices that hang, and an imposed budget."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from click.testing import CliRunner
from testbed.hostile.actor import Actor
from testbed.hostile.intake import attacked
from testbed.hostile.judge import Rule, above_budget, mean_rate
from testbed.hostile.schedule import Attack, Done, Terms, eventually
from testbed.hostile.stage import (
    ATTACKER,
    TUNER,
    HostileStage,
    Sampler,
    lower_caps,
    sampling,
    tuner,
)
from testbed.hostile.traffic import ask_capper
from testbed.journal_corruption import corrupt_audit, corrupt_journal, snapshot

from wattspan.cli.caps import command as caps_commands
from wattspan.model import SECOND
from wattspan.ports import WattspanError

FLOOR = 0.6  # [autotune] floor, of the default limit
BACK = 15.0  # seconds within which the original limits are back
KILLS = 200
CORRUPTIONS = 1_000
RATE = 20.0  # samples a second, at least
BUDGET = 1_200  # watts, of 1,940 that the host may draw without caps
LONGEST_STOP = 25.0  # seconds; TimeoutStopSec of the unit is 30
PROMPT = 6.0  # seconds: a lease of 2 s, and the capper's turns

# ----------------------------------------------------------------------------- abuse of the socket

_HELLO = {"do": "hello", "who": "an attacker"}
_CEILING = {"do": "ceiling", "limit": 1, "why": "an attack"}
_TIMED = {**_CEILING, "ttl": 3600 * SECOND}


def _lines(*requests: object) -> list[str]:
    return [one if isinstance(one, str) else json.dumps(one) for one in requests]


def _abused(
    *requests: object, uid: int = TUNER, parallel: int = 8, reads: bool = True, keeps: bool = True
) -> Callable[[HostileStage, Terms], Done]:
    """Requests to the capper's socket; no limit may fall below the floor, or stay lowered."""

    def run(stage: HostileStage, terms: Terms) -> Done:
        floors = {name: FLOOR * watts for name, watts in stage.limits.watts().items()}
        with sampling(stage.limits) as sampler:
            done = attacked(
                stage,
                "caps",
                terms.seconds(6.0),
                uid=uid,
                socket_path=str(stage.capper_socket),
                lines=_lines(*requests),
                parallel=parallel,
                reads=reads,
                keeps=keeps,
            )
        ended = time.monotonic()
        faults = [*_below(sampler, floors), *_still_lowered(stage)]
        return Done(done.answers, faults=faults, ended=ended)

    return run


def _below(sampler: Sampler, floors: dict[str, float]) -> list[str]:
    lowest = {name: min(one.watts[name] for one in sampler.samples) for name in floors}
    return [
        f"{name} was at {watts:.0f} W, its floor is {floors[name]:.0f} W"
        for name, watts in lowest.items()
        if watts < floors[name] - 1
    ]


def _still_lowered(stage: HostileStage) -> list[str]:
    """Limits left by an attack; they are removed, so that the next attack starts clean."""
    faults = []
    if eventually(stage.original, PROMPT) is None:
        faults.append(f"still in force: {', '.join(stage.limits.turned())}")
    if (ceiling := _ceiling(stage)) is not None:
        faults.append(f"a ceiling of {ceiling / 1000:g} W is still in force")
    if faults:
        _remove_everything(stage)
    return faults


def _ceiling(stage: HostileStage) -> int | None:
    """The ceiling in force, in milliwatts."""
    (told,) = ask_capper(str(stage.capper_socket), {"do": "status"})
    return told.get("ceiling")


def _remove_everything(stage: HostileStage) -> None:
    stage.caps_command("caps", "restore")
    end_capper(stage, signal.SIGTERM)
    for kept in stage.capper.directory.glob("ceilings*"):
        kept.unlink()
    start_capper(stage)


def _others_ceiling(stage: HostileStage, terms: Terms) -> Done:
    """Root sets a ceiling for a minute; the tuner's user sets a lower one of its own."""
    wanted, path = 1_500_000, str(stage.capper_socket)
    imposed = {"do": "ceiling", "limit": wanted, "why": "imposed by root", "ttl": 60 * SECOND}
    ask_capper(path, {"do": "hello", "who": "root"}, imposed)
    attack = _lines(_HELLO, _CEILING, _TIMED)
    seconds = terms.seconds(2.0)
    done = attacked(stage, "caps", seconds, uid=TUNER, socket_path=path, lines=attack, parallel=1)
    found = _ceiling(stage)
    ask_capper(path, {"do": "hello", "who": "root"}, {"do": "ceiling", "limit": None})
    ended = time.monotonic()
    faults = [] if found == wanted else [f"root's ceiling of 1500 W has become {found} mW"]
    return Done(done.answers, faults=[*faults, *_still_lowered(stage)], ended=ended)


def _hold_of_all(value: int) -> dict[str, object]:
    return {
        "do": "hold",
        "job": "attack",
        "caps": [
            {"knob": "cpu_power", "device": f"rapl:package-{number}", "value": value}
            for number in range(2)
        ],
    }


_UNSOUND = ("x" * 100, "{", '{"do":"hold"}', "[" * 60_000, '{"do":"ceiling","limit":1e999}', "\x00")

ABUSE = [
    Attack(
        "ceilings of an unlisted user", "capper", _abused(_HELLO, _CEILING, _TIMED, uid=ATTACKER)
    ),
    Attack("ceilings of the tuner's user", "capper", _abused(_HELLO, _CEILING, _TIMED)),
    Attack("a ceiling below root's", "capper", _others_ceiling),
    Attack("holds below the floor", "capper", _abused(_HELLO, _hold_of_all(1))),
    Attack(
        "repeated hold and release",
        "capper",
        _abused(_HELLO, _hold_of_all(200_000), {"do": "release", "job": ""}),
    ),
    Attack(
        "repeated hold and disconnect",
        "capper",
        _abused(_HELLO, _hold_of_all(200_000), keeps=False),
    ),
    Attack(
        "requests whose answers are not read",
        "capper",
        _abused(_HELLO, {"do": "status"}, parallel=40, reads=False),
    ),
    Attack(
        "a flood of requests",
        "capper",
        _abused(_HELLO, {"do": "status"}, parallel=40, keeps=False),
    ),
    Attack("oversized lines", "capper", _abused(_HELLO, "x" * 200_000, reads=False)),
    Attack("lines that are not requests", "capper", _abused(*_UNSOUND)),
    Attack(
        "connections of an unlisted user",
        "capper",
        _abused(_HELLO, {"do": "status"}, uid=ATTACKER, parallel=200, keeps=False),
    ),
]

# ------------------------------------------------------------------------------------------ kills


def end_capper(stage: HostileStage, number: int) -> None:
    """End the capper by a signal."""
    stage.capper.end(number)


def start_capper(stage: HostileStage) -> None:
    """Start another one, and return once it answers."""
    stage.capper = stage.start_capper()
    stage.until(stage.capper_answers, "another capper answers", 60)


@dataclass
class Tally:
    """Results of many kills."""

    kills: int = 0
    back: int = 0
    slowest: float = 0.0

    def __str__(self) -> str:
        return f"originals back {self.back} of {self.kills}, at most {self.slowest:.1f} s later"


def _held(stage: HostileStage, watts: dict[str, int]) -> Actor:
    holder = tuner(stage, watts)
    said = holder.said()
    if eventually(stage.limits.turned, 10.0) is None:
        raise RuntimeError(f"no cap came into force; the capper answered: {said}")
    return holder


def _killed(stage: HostileStage, terms: Terms) -> Done:
    """Kill the capper, the agent with its tuner, or all, while caps of the tuner are in force."""
    draw, watts, tally = terms.draw(), lower_caps(stage), Tally()
    faults: list[str] = []
    for number in range(terms.count(KILLS, 3)):
        whom = ("capper", "agent", "both")[number] if terms.quick else _victim(draw)
        holder = _held(stage, watts)
        try:
            time.sleep(draw.random() * 0.6)
            tally.kills += 1
            took = _kill(stage, whom, holder)
        finally:
            holder.end()
        if took is None:
            faults.append(f"kill {tally.kills} ({whom}): {', '.join(stage.limits.turned())}")
            _remove_everything(stage)
        else:
            tally.back += 1
            tally.slowest = max(tally.slowest, took)
        if whom != "agent" and stage.capper.process.poll() is not None:
            start_capper(stage)
        if whom != "capper":
            stage.begin_again()
    return Done(note=str(tally), faults=faults[:5])


def _victim(draw: random.Random) -> str:
    return draw.choice(("capper", "capper", "agent", "both"))


def _kill(stage: HostileStage, whom: str, holder: Actor) -> float | None:
    """Kill; the seconds until all original limits are back, None if they are not."""
    if whom in ("agent", "both"):
        stage.agent.kill()
        holder.end()
    if whom in ("capper", "both"):
        stage.capper.process.kill()
    stage.agent.wait(30) if whom != "capper" else None
    begun = time.monotonic()
    if whom != "agent":
        stage.capper.process.wait(30)
        stage.stop_post()
    after = eventually(stage.original, BACK)
    return None if after is None else time.monotonic() - begun


# --------------------------------------------------------------------------------- imposed budget


@dataclass(frozen=True)
class Event:
    """One thing that is done to the services under an imposed budget."""

    name: str
    act: Callable[[HostileStage, random.Random], None]


def _service_stops(stage: HostileStage, number: int, draw: random.Random) -> None:
    """The capper ends, its ExecStopPost runs, and some time later another one is started."""
    end_capper(stage, number)
    stage.stop_post()
    time.sleep(draw.random() * 2)
    start_capper(stage)


def _agent_ends(stage: HostileStage, number: int, draw: random.Random) -> None:
    stage.agent.send_signal(number)
    stage.agent.wait(60)
    time.sleep(draw.random())
    stage.begin_again()


def _upgrade(stage: HostileStage, draw: random.Random) -> None:
    """Both services are stopped, stay so for some seconds, and are started."""
    stage.agent.terminate()
    stage.agent.wait(60)
    end_capper(stage, signal.SIGTERM)
    stage.stop_post()
    time.sleep(2 + draw.random())
    start_capper(stage)
    stage.begin_again()


def _stands_still(stage: HostileStage, draw: random.Random) -> None:
    stage.capper.process.send_signal(signal.SIGSTOP)
    time.sleep(2 + draw.random())
    _service_stops(stage, signal.SIGKILL, draw)


def _tuner_dies(stage: HostileStage, draw: random.Random) -> None:
    """A tuner holds caps below the shares of the budget, and is killed."""
    watts = {name: round(value * 0.9) for name, value in lower_caps(stage).items()}
    with tuner(stage, watts) as holder:
        holder.said()
        time.sleep(1 + draw.random())
    time.sleep(1.0)


def _all_killed(stage: HostileStage, draw: random.Random) -> None:
    stage.agent.kill()
    _service_stops(stage, signal.SIGKILL, draw)
    stage.agent.wait(30)
    stage.begin_again()


EVENTS = [
    Event("SIGKILL of the capper", lambda s, d: _service_stops(s, signal.SIGKILL, d)),
    Event("SIGTERM of the capper", lambda s, d: _service_stops(s, signal.SIGTERM, d)),
    Event("upgrade", _upgrade),
    Event("SIGKILL of the agent", lambda s, d: _agent_ends(s, signal.SIGKILL, d)),
    Event("SIGTERM of the agent", lambda s, d: _agent_ends(s, signal.SIGTERM, d)),
    Event("SIGKILL of both", _all_killed),
    Event("SIGSTOP, then SIGKILL of the capper", _stands_still),
    Event("SIGHUP", lambda s, d: s.capper.process.send_signal(signal.SIGHUP)),
    Event("SIGKILL of a tuner", _tuner_dies),
]


def _budget_kept(stage: HostileStage, terms: Terms) -> Done:
    """All processes are ended and restarted in any order, under an imposed budget."""
    if eventually(lambda: sum(stage.limits.watts().values()) <= BUDGET, 30.0) is None:
        return Done(faults=[f"the budget never came into force: {stage.limits.watts()}"])
    draw = terms.draw()
    events = [*EVENTS[:3]] if terms.quick else EVENTS * 5
    draw.shuffle(events)
    times: list[tuple[str, float]] = []
    with sampling(stage.limits) as sampler:
        for event in events:
            times.append((event.name, time.monotonic()))
            event.act(stage, draw)
            time.sleep(draw.random())
    rate, most = mean_rate(sampler.samples), max(one.total for one in sampler.samples)
    above = above_budget(sampler.samples, BUDGET)
    faults = []
    if above:
        causes = sorted({_cause(times, one.at) for one in above})
        faults.append(
            f"{most:.0f} W against a budget of {BUDGET} W, in {len(above)} samples"
            f" ({len(above) / rate:.1f} s), after: {', '.join(causes)}"
        )
    if rate < RATE:
        faults.append(f"only {rate:.0f} samples a second")
    samples = f"{len(sampler.samples):,} samples ({rate:.0f}/s) over {len(events)} events"
    note = f"{samples}, at most {most:.0f} W"
    return Done(note=note, faults=[*faults, *_lifted(stage)])


def _cause(times: Sequence[tuple[str, float]], at: float) -> str:
    return next((name for name, begun in reversed(times) if begun <= at), "the start")


def _lifted(stage: HostileStage) -> list[str]:
    """The operator's command gives everything back, an imposed budget too."""
    done = stage.caps_command("caps", "restore")
    if eventually(stage.original, BACK) is not None:
        return []
    return [f"`caps restore` ({done.returncode}) left {', '.join(stage.limits.turned())}"]


KILLED = [
    Attack(f"{KILLS} kills with caps in force", "kills", _killed, Rule(others=False, memory=False)),
    Attack(
        "ends and starts under a budget",
        "budget",
        _budget_kept,
        Rule(others=False, memory=False),
        stage=lambda: HostileStage(budget=BUDGET),
    ),
]

# ------------------------------------------------------------------------------------------ hangs


@dataclass(frozen=True)
class Hang:
    """A device that does not answer: its limit, its name for the capper, and the fault."""

    limit: str
    device: str
    fault: dict[str, object]
    mended: dict[str, object]

    def begin(self, stage: HostileStage) -> None:
        stage.host.ask(do="fault", **self.fault)

    def end(self, stage: HostileStage) -> None:
        stage.host.ask(do="fault", **self.mended)


def hangs(stage: HostileStage) -> list[Hang]:
    """One of each device."""
    found = []
    for number in range(2):
        board = f"gpu:{stage.gpu(number)}"
        how: dict[str, object] = {"gpu": number, "fault": "hang"}
        found.append(Hang(f"board {number}", board, {**how, "on": True}, {**how, "on": False}))
    for number in range(2):
        zone = f"intel-rapl:{number}"
        begin: dict[str, object] = {"zone": zone, "fault": "hang"}
        end: dict[str, object] = {"zone": zone, "fault": "release"}
        found.append(Hang(zone, f"rapl:package-{number}", begin, end))
    return found


def _hung(
    through: Callable[[HostileStage, Hang, Actor], list[str]],
) -> Callable[[HostileStage, Terms], Done]:
    """All devices are capped, one hangs, and the caps must be restored."""

    def run(stage: HostileStage, terms: Terms) -> Done:
        faults: list[str] = []
        tried: list[str] = []
        for hang in hangs(stage)[:: 2 if terms.quick else 1]:
            holder = _held(stage, lower_caps(stage))
            try:
                if eventually(lambda: len(stage.limits.turned()) == 4, 10.0) is None:
                    faults.append(f"only capped: {', '.join(stage.limits.turned())}")
                    continue
                try:
                    hang.begin(stage)
                except WattspanError as error:
                    tried.append(f"{hang.limit} not hung ({error})")
                    continue
                try:
                    found = through(stage, hang, holder)
                finally:
                    hang.end(stage)
                tried.append(hang.limit)
                after = eventually(stage.original, BACK)
                if after is None:
                    left = ", ".join(stage.limits.turned())
                    found.append(f"after the end of the hang still in force: {left}")
                faults += [f"{hang.limit} hung: {one}" for one in found]
            finally:
                holder.end()
                if stage.capper.process.poll() is not None:
                    start_capper(stage)
            if eventually(stage.original, BACK) is None:
                _remove_everything(stage)
        return Done(note="; ".join(tried), faults=faults)

    return run


def _tuner_ends(stage: HostileStage, hang: Hang, holder: Actor) -> list[str]:
    """The tuner is killed: the capper restores the responding devices."""
    holder.end()
    if eventually(lambda: not stage.limits.turned(without=[hang.limit]), PROMPT) is None:
        left = ", ".join(stage.limits.turned(without=[hang.limit]))
        return [f"{PROMPT:g} s after the tuner's end still in force: {left}"]
    return []


def _capper_ends(stage: HostileStage, hang: Hang, holder: Actor) -> list[str]:
    """The capper is killed: ExecStopPost restores the responding devices."""
    end_capper(stage, signal.SIGKILL)
    found = []
    begun = time.monotonic()
    try:
        done = stage.stop_post(LONGEST_STOP)
    except subprocess.TimeoutExpired:
        found.append(f"ExecStopPost did not end within {LONGEST_STOP:g} s")
    else:
        if done.returncode == 0:
            found.append("ExecStopPost ended with 0")
        if hang.device not in (said := done.stdout + done.stderr) and hang.limit not in said:
            found.append(f"ExecStopPost does not name it: {said[-300:]!r}")
    if left := stage.limits.turned(without=[hang.limit]):
        found.append(f"{time.monotonic() - begun:.0f} s later still in force: {', '.join(left)}")
    stage.capper = stage.start_capper()  # it restores the rest, once that responds
    return found


HANGS = [
    Attack(
        "a device hangs and the tuner is killed", "hangs", _hung(_tuner_ends), Rule(others=False)
    ),
    Attack(
        "a device hangs and the capper is killed", "hangs", _hung(_capper_ends), Rule(others=False)
    ),
]

# --------------------------------------------------------------------------------------- journals


@dataclass
class Left:
    """Files of a capper that was killed while it held caps on every device."""

    stage: HostileStage
    originals: dict[str, int]
    capped: dict[str, int]
    history: list[dict[str, bytes]]
    audit: bytes

    def lay_out(self) -> None:
        """Have the caps in force and the files in place, as they were after the kill."""
        directory = self.stage.capper.directory
        for path in directory.glob("journal-*"):
            path.unlink()
        for name, content in self.history[-1].items():
            (directory / name).write_bytes(content)
        (directory / "audit.jsonl").write_bytes(self.audit)
        self.stage.limits.put(self.capped)

    def restored(self) -> tuple[int, str]:
        """Exit code of `caps restore`, run in this process, and its output."""
        done = CliRunner().invoke(caps_commands, ["restore", "--json", *self.stage.capper.words])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            return done.exit_code, f"{done.exception!r}"
        return done.exit_code, done.output

    def wrong(self, code: int, said: str, names: Mapping[str, str]) -> list[str]:
        """Faults: a wrong value, or a cap that stays and is not named."""
        found = []
        for limit, value in self.stage.limits.stand().items():
            if value == self.originals[limit]:
                continue
            if value != self.capped[limit]:
                found.append(f"{limit} was set to {value}, its original is {self.originals[limit]}")
            elif names[limit] not in said or code != 6:
                found.append(f"{limit} stays capped, not named, exit code {code}")
        return found


def _left(stage: HostileStage) -> Left:
    """Several generations of a journal, and then a kill."""
    originals, history = stage.limits.stand(), [dict[str, bytes]()]
    client = stage.capper.client()
    for part in (0.9, 0.8, 0.7):
        rows = [row.state for row in client.rows() if row.state.default]
        caps = {one.key: round((one.default or 0) * part) for one in rows}
        client.hold("job", caps, "an attack")
        history.append(snapshot(stage.capper.directory))
    end_capper(stage, signal.SIGKILL)
    client.close()
    audit = (stage.capper.directory / "audit.jsonl").read_bytes()
    return Left(stage, originals, stage.limits.stand(), history, audit)


def _corrupted(stage: HostileStage, terms: Terms) -> Done:
    """Damage the journal, and the audit log in half of the cases, and restore from the rest."""
    names = {hang.limit: hang.device for hang in hangs(stage)}
    left, faults, whole = _left(stage), list[str](), 0
    count = terms.count(CORRUPTIONS, 30)
    for seed in range(count):
        draw = random.Random(f"{terms.seed} {seed}")
        left.lay_out()
        how = corrupt_journal(stage.capper.directory, left.history, draw)
        how += "; " + corrupt_audit(stage.capper.directory / "audit.jsonl", draw)
        wrong = left.wrong(*left.restored(), names)
        faults += [f"{how}: {one}" for one in wrong]
        whole += stage.limits.stand() == left.originals
    stage.limits.put(left.originals)
    for path in stage.capper.directory.glob("journal-*"):
        path.unlink()
    start_capper(stage)
    note = f"{whole} of {count} restored whole, {len(faults)} limits wrong or silently kept"
    return Done(note=note, faults=faults[:5])


JOURNALS = [
    Attack(
        f"{CORRUPTIONS:,} corruptions of the journal",
        "journal",
        _corrupted,
        Rule(others=False),
        stage=lambda: HostileStage(lease="1m"),
    )
]

ATTACKS = [*ABUSE, *KILLED, *HANGS, *JOURNALS]
