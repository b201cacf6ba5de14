"""Attacks on the receivers of spans, the metrics server and the endpoint for questions."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from testbed.hostile import bodies
from testbed.hostile.actor import Actor
from testbed.hostile.bodies import MIB, Body
from testbed.hostile.judge import Rule
from testbed.hostile.schedule import Attack, Done, Terms, eventually
from testbed.hostile.stage import ATTACKER, HostileStage
from testbed.process_costs import cpu_seconds

LATE = 20.0  # seconds after its time at which an attacker is killed
STOP_WITHIN = 5.0  # seconds
BUSY_FOR = 0.5  # seconds
HALF_OPEN = 400  # connections to each listener
LARGE_REQUESTS = 64  # at a time
REFUSED = 1_000  # of every kind
GROWTH = 10.0  # MB that may remain after the refused requests

Targets = Callable[[HostileStage], Sequence[str]]


def http_listeners(stage: HostileStage) -> Sequence[str]:
    return [stage.unix, stage.tcp]


def grpc_listeners(stage: HostileStage) -> Sequence[str]:
    return [stage.grpc, stage.grpc_unix]


def attacked(
    stage: HostileStage, program: str, seconds: float, *, uid: int = ATTACKER, **settings: object
) -> Done:
    """Have a process of another user attack for so many seconds, or until the agent has ended."""
    with Actor(uid, program, seconds=seconds, **settings) as actor:
        return Done(actor.result(seconds + LATE, lambda: stage.alive))


def sent(
    found: Sequence[Body],
    targets: Targets,
    *,
    seconds: float = 10.0,
    parallel: int = 4,
    rounds: int = 1_000_000,
    program: str = "requests",
    **settings: object,
) -> Callable[[HostileStage, Terms], Done]:
    """An attack by requests with these bodies, at most ``rounds`` of each to each listener."""

    def run(stage: HostileStage, terms: Terms) -> Done:
        to = targets(stage)
        some = found[:: max(1, len(found) // 3)] if terms.quick else found
        return attacked(
            stage,
            program,
            terms.seconds(seconds),
            targets=to,
            bodies=[body.told() for body in some],
            parallel=parallel,
            count=rounds * len(some) * len(to),
            **settings,
        )

    return run


def zipped(found: Sequence[Body]) -> list[Body]:
    return [bodies.gzipped(body) for body in found]


# ---------------------------------------------------------------------------------------- floods

_FULL = 63 * MIB
"""Below the largest request, 64 MiB, that the agent takes without further settings."""
_PLAIN = 7 * MIB

VARINTS = [
    Attack(
        "varints, HTTP",
        "varints",
        sent([*bodies.varints(MIB), *zipped(bodies.varints(60 * MIB))], http_listeners),
    ),
    Attack(
        "varints, gRPC",
        "varints",
        sent(bodies.varints(4 * MIB), grpc_listeners, program="calls"),
    ),
]

FIELDS = [
    Attack(
        "fields in protobuf, gzip",
        "fields",
        sent(zipped(bodies.protobuf_floods(_FULL)), http_listeners, seconds=20.0),
    ),
    Attack(
        "fields in protobuf, plain",
        "fields",
        sent(bodies.protobuf_floods(_PLAIN), http_listeners, seconds=20.0),
    ),
    Attack(
        "fields in JSON",
        "fields",
        sent(
            [*bodies.json_floods(_PLAIN), *zipped(bodies.json_floods(_PLAIN))],
            http_listeners,
            seconds=20.0,
        ),
    ),
    Attack(
        "fields in protobuf, gRPC",
        "fields",
        sent(bodies.protobuf_floods(_PLAIN), grpc_listeners, seconds=20.0, program="calls"),
    ),
]

BOMBS = [
    Attack("bombs, HTTP", "bombs", sent(bodies.bombs(256 * MIB), http_listeners)),
    Attack(
        "bombs, gRPC",
        "bombs",
        sent(
            [one for one in bodies.bombs(256 * MIB) if one.encodings == ("gzip",)],
            grpc_listeners,
            program="calls",
        ),
    ),
]

PLACES = [
    Attack(
        f"{LARGE_REQUESTS} large requests at once",
        "places",
        sent(
            [Body("spans", ((bodies.span_template(20_000), 1),))],
            http_listeners,
            parallel=LARGE_REQUESTS,
        ),
    )
]


# --------------------------------------------------------------------------------------- refusals


def _questions(stage: HostileStage, terms: Terms) -> Done:
    """Requests that the metrics server and api.sock refuse."""
    answers: dict[str, int] = {}
    for method, path in (("POST", "/metrics"), ("GET", "/nothing"), ("GET", "/v1/energy?start=x")):
        done = attacked(
            stage,
            "requests",
            terms.seconds(15.0),
            targets=[stage.metrics, stage.api],
            bodies=[Body("a query", ((b"x", 60_000),)).told()],
            parallel=4,
            count=terms.count(2 * REFUSED, 20),
            method=method,
            path=path,
        )
        for answer, count in done.answers.items():
            answers[answer] = answers.get(answer, 0) + count
    return Done(answers)


REFUSALS = [
    Attack(
        f"{REFUSED:,} refused exports of every kind",
        "refusals",
        sent(
            bodies.refused(70 * MIB),
            http_listeners,
            seconds=150.0,
            rounds=REFUSED // 2,
        ),
        Rule(growth=GROWTH),
    ),
    Attack(
        f"{REFUSED:,} refused queries of every kind", "refusals", _questions, Rule(growth=GROWTH)
    ),
]


# ----------------------------------------------------------------------------------- slow clients

_HEAD = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
_BODY = (
    "POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"
    "Content-Length: 250000\r\n\r\n"
)
_UNREAD = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40
_WAITING = "GET /v1/energy?start=-1s&end=-1ms&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HTTP2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_LISTENERS: dict[str, tuple[Callable[[HostileStage], str], dict[str, str]]] = {
    "metrics": (lambda s: s.metrics, {"heads": _HEAD, "unread answers": _UNREAD}),
    "OTLP/HTTP": (lambda s: s.tcp, {"heads": _HEAD, "bodies": _BODY, "unread answers": _UNREAD}),
    "otlp.sock": (lambda s: s.unix, {"heads": _HEAD, "bodies": _BODY, "unread answers": _UNREAD}),
    "OTLP/gRPC": (lambda s: s.grpc, {"heads": _HTTP2}),
    "otlp-grpc.sock": (lambda s: s.grpc_unix, {"heads": _HTTP2}),
    "api.sock": (lambda s: s.api, {"heads": _HEAD, "waiting queries": _WAITING}),
    "feed.sock": (lambda s: s.feed, {"heads": "w"}),
    "capper.sock": (lambda s: f"unix:{s.capper_socket}", {"heads": '{"do":'}),
}


def _slow(
    target: Callable[[HostileStage], str], first: str
) -> Callable[[HostileStage, Terms], Done]:
    def run(stage: HostileStage, terms: Terms) -> Done:
        trickle = "" if first == _UNREAD else "a"
        return attacked(
            stage,
            "slow",
            terms.seconds(12.0),
            targets=[target(stage)],
            first=first,
            then=trickle,
            count=HALF_OPEN,
            every=0.5,
        )

    return run


SLOW = [
    Attack(f"{HALF_OPEN} slow {kind}, {name}", "slow", _slow(target, first))
    for name, (target, kinds) in _LISTENERS.items()
    for kind, first in kinds.items()
]


# ------------------------------------------------------------------------------- the side channel


def _announced(how: str) -> Callable[[HostileStage, Terms], Done]:
    def run(stage: HostileStage, terms: Terms) -> Done:
        seconds = terms.seconds(8.0)
        return attacked(stage, "announce", seconds, run_dir=str(stage.run), how=how, rings=8)

    return run


SIDE_CHANNEL = [
    Attack("announced spans that never end", "side channel", _announced("flood")),
    Attack("rings that break the protocol", "side channel", _announced("skip")),
    Attack("invalid hello messages", "side channel", _announced("hello")),
]


# -------------------------------------------------------------------------------------- the stop


def _stopped(name: str, found: Sequence[Body]) -> Attack:
    """SIGTERM while the agent decodes these bodies."""

    def run(stage: HostileStage, terms: Terms) -> Done:
        told = [body.told() for body in found]
        to = http_listeners(stage)
        pid = stage.agent.pid
        with Actor(ATTACKER, "requests", targets=to, bodies=told, parallel=8, seconds=60.0):
            busy = eventually(lambda: _is_busy(pid), 20.0) is not None
            begun = time.monotonic()
            stage.agent.send_signal(signal.SIGTERM)
            try:
                code: int | None = stage.agent.wait(2 * STOP_WITHIN)
            except subprocess.TimeoutExpired:
                code = None
            took = time.monotonic() - begun
        stage.start_anew()
        how = "did not end" if code is None else f"ended with {code}"
        note = f"{how} {took:.1f} s after SIGTERM{'' if busy else ', not busy'}"
        if code == 0 and took <= STOP_WITHIN:
            return Done(note=note)
        return Done(faults=[note])

    return Attack(
        f"SIGTERM during the decoding of {name}", "stop", run, Rule(others=False, memory=False)
    )


def _is_busy(pid: int) -> bool:
    """True if a process uses more than a quarter of some time for computing, next to other load."""
    before = cpu_seconds(pid)
    time.sleep(BUSY_FOR)
    return cpu_seconds(pid) - before > BUSY_FOR / 4


STOP = [
    _stopped("varints", [*bodies.varints(MIB), *zipped(bodies.varints(60 * MIB))]),
    _stopped("fields", bodies.protobuf_floods(_PLAIN)[:4]),
    _stopped("JSON", bodies.json_floods(_PLAIN)[:4]),
]

ATTACKS = [*VARINTS, *FIELDS, *BOMBS, *PLACES, *REFUSALS, *SLOW, *SIDE_CHANNEL, *STOP]
