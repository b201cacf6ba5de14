"""Requests to language models and the processes of their engines."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

import pytest

from wattspan.config.settings import SPAN_PRESETS
from wattspan.inference.division import FIRST_HOLD, MAX_REQUESTS, RequestEnergy
from wattspan.inference.requests import InferenceRequest
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Checkpoint,
    Consumer,
    Domain,
    Group,
    GroupKind,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Share,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.inference_joiner import InferenceJoiner
from wattspan.sharing.pools import PoolName
from wattspan.spans.values import InferenceDetails, Span, SpanColumns, TokenRole

S, STEP = SECOND, 100 * MILLISECOND
MAX_ENGINES, ENGINE_TIMEOUT = PoolName.ENGINES.limit, PoolName.ENGINES.lifetime
SERVER, WORKER, OTHER = Consumer(10, 1), Consumer(11, 2), Consumer(20, 1)
TIMES = InferenceDetails("m", queue=0, first_token=S // 2)
POWER = 10_000_000  # uJ a step: 100 W


class Host:
    """GPUs whose energy is that of given processes, 100 W each, without idle energy."""

    def __init__(self, *gpus: str, presets: Collection[str] = SPAN_PRESETS) -> None:
        self.gpus = gpus or ("gpu0",)
        self.history = EnergyHistory(600 * S, 10**8)
        self.found: dict[int, RequestEnergy] = {}
        self.requests: list[InferenceRequest] = []
        self.joiner = InferenceJoiner(self.history, self._found, presets=presets)
        self.now = 100 * S
        self.spent = 0
        domains = [
            Domain(gpu, HwType.GPU, gpu, "fake", Provenance.EMULATED, resource=gpu)
            for gpu in self.gpus
        ]
        self.history.apply(Tick(self._at(self.now), domains={"fake": domains}), ())

    def _found(self, settled) -> None:
        self.found |= {int.from_bytes(each.request.id, "big"): each for each in settled}

    def _at(self, time: int) -> Instant:
        return Instant(time, time)

    def born(self, process: Consumer, parent: int, container: str = "") -> None:
        groups = (Group(GroupKind.CONTAINER, container),) if container else ()
        info = PayerInfo(process, "python", groups, parent=parent, principal=Principal(1000))
        self.history.apply(Tick(self._at(self.now), births=[info]), ())

    def run(self, seconds: float, users: Mapping[str, tuple[Consumer, ...]]) -> None:
        for _ in range(round(seconds * S) // STEP):
            before, self.now = self.now, self.now + STEP
            settled = []
            for gpu in self.gpus:
                shares = tuple(Share(one, Microjoules(POWER)) for one in users.get(gpu, ()))
                energy = Microjoules(POWER * len(shares))
                self.spent += energy
                interval = Interval(gpu, self._at(before), self._at(self.now), energy)
                settled.append(Attribution(interval, shares, Microjoules(0), Microjoules(0)))
            self.history.apply(Tick(self._at(self.now)), settled)
            self.joiner.turn(self.now)

    def send(
        self,
        ident: int,
        start: float,
        *,
        sender: Consumer = SERVER,
        details: InferenceDetails | None = TIMES,
        service: str = "llm",
        tokens: tuple[int, int] = (100, 11),
        name: str = "llm_request",
        end: float = 0.0,
        role: TokenRole = TokenRole.PLAIN,
        parent: int = 0,
        user: int = 1000,
    ) -> None:
        """A request or another span from ``start`` to ``end`` seconds ago."""
        begin, until = self.now - round(start * S), self.now - round(end * S)
        own = b"t" * 16, ident.to_bytes(8, "big"), parent.to_bytes(8, "big") if parent else b""
        span = Span(*own, service, name, begin, until, None, *tokens, role, details)
        owner, spans = Principal(user), SpanColumns.of([span])
        found = self.joiner.add(sender, spans, self.now, owner.path, principal=owner)
        self.requests += found.values()

    def send_calls(
        self, owner: Principal, sender: Consumer, idents: Iterable[int], parent: int = 0
    ) -> None:
        """Calls of a service elsewhere, with tokens."""
        above = parent.to_bytes(8, "big") if parent else b""
        time, tokens = (self.now - S, self.now), (100, 11)
        ids = [(b"t" * 16, ident.to_bytes(8, "big"), above) for ident in idents]
        details, remote = InferenceDetails("m"), TokenRole.REMOTE
        spans = [Span(*own, "app", "chat", *time, None, *tokens, remote, details) for own in ids]
        self.joiner.add(
            sender,
            SpanColumns.of(spans),
            self.now,
            owner.path,
            str(owner.user),
            principal=owner,
        )

    def settle(self) -> None:
        self.joiner.turn(self.now, wait=False)


def test_energy_of_workers_is_that_of_the_requests_of_their_server() -> None:
    host = Host("gpu0", "gpu1")
    host.born(SERVER, 1)
    host.born(WORKER, SERVER.pid)
    host.run(2, {"gpu0": (WORKER,), "gpu1": (WORKER,)})
    host.send(1, 1.0)
    host.run(FIRST_HOLD / S + 3, {"gpu0": (), "gpu1": ()})

    assert host.found[1].energy == pytest.approx(2 * 100e6, rel=1e-5)
    assert host.found[1].energy + host.joiner.idle == 2 * 100_000_000
    (row,) = host.joiner.rows
    assert (row.service, row.model) == ("llm", "m")
    assert sum(row.energy.values()) == host.found[1].energy
    assert row.tokens == {"input": 100, "output": 11}
    assert row.requests == {"model": 0, "tokens": 1}


def test_totals_continue_from_a_checkpoint() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.run(FIRST_HOLD / S + 3, {"gpu0": ()})
    before = host.joiner
    saved = Checkpoint(
        host._at(host.now), "boot", inference=before.rows, inference_idle=before.idle
    )
    after = InferenceJoiner(host.history, checkpoint=saved)
    assert before.rows
    assert (after.rows, after.idle) == (before.rows, before.idle)


def test_requests_wait_for_longer_ones_of_the_same_time() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.run(5, {"gpu0": (SERVER,)})

    assert host.joiner.waiting == 1
    host.settle()
    assert host.joiner.waiting == 0
    assert host.found[1].energy == 100_000_000


def test_energy_of_requests_and_idle_time_is_that_of_the_engine() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.born(WORKER, SERVER.pid)
    host.run(1, {"gpu0": (WORKER, OTHER)})
    host.send(1, 1.0)
    for number in range(2, 30):
        host.run(1.3, {"gpu0": (WORKER, OTHER)})
        host.send(number, 0.7)
    host.settle()

    total = sum(each.energy for each in host.found.values()) + host.joiner.idle
    assert total == host.spent / 2
    assert host.joiner.idle > 0


def test_engines_on_two_gpus_are_kept_apart() -> None:
    host = Host("gpu0", "gpu1")
    host.born(SERVER, 1)
    host.born(OTHER, 1)
    for number in range(10):
        host.run(1, {"gpu0": (SERVER,), "gpu1": (OTHER, OTHER._replace(pid=99))})
        host.send(2 * number, 1.0)
        host.send(2 * number + 1, 1.0, sender=OTHER, service="second")
    host.settle()

    energies = {row.service: sum(row.energy.values()) for row in host.joiner.rows}
    assert energies == {"llm": 10 * 100_000_000, "second": 10 * 100_000_000}


@pytest.mark.parametrize("claimed", [(1, 1), (10_000_000, 10_000_000)])
def test_tokens_of_another_user_move_no_energy_on_a_shared_board(claimed: tuple[int, int]) -> None:
    host = Host()
    host.born(SERVER, 1)
    host.born(OTHER, 1)
    for number in range(10):
        host.run(1, {"gpu0": (SERVER, OTHER)})
        host.send(2 * number, 1.0)
        host.send(2 * number + 1, 1.0, sender=OTHER, service="hers", tokens=claimed, user=1001)
    host.settle()

    energies = {row.service: sum(row.energy.values()) for row in host.joiner.rows}
    assert energies == {"llm": 10 * 100_000_000, "hers": 10 * 100_000_000}


def test_request_of_another_user_from_long_ago_adds_no_energy_to_an_engine() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.born(OTHER, 1)
    host.run(5, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.send(2, 90.0, sender=OTHER, service="hers", user=1001)
    host.run(FIRST_HOLD / S + 3, {"gpu0": ()})

    assert host.found[1].energy == 100_000_000
    assert host.joiner.idle == 0


def test_later_engine_has_the_energy_since_its_first_request() -> None:
    host = Host("gpu0", "gpu1")
    host.born(SERVER, 1)
    host.born(OTHER, 1)
    users = {"gpu0": (SERVER,), "gpu1": (OTHER,)}
    host.run(1, users)
    host.send(1, 1.0)
    host.run(10, users)
    host.send(2, 4.0, sender=OTHER)
    host.settle()

    assert host.found[2].energy == 400_000_000


def test_container_is_one_engine() -> None:
    host = Host()
    host.born(SERVER, 1, "vllm")
    host.born(WORKER, 1, "vllm")  # no child of the server
    host.run(1, {"gpu0": (WORKER,)})
    host.send(1, 1.0)
    host.settle()

    assert host.found[1].energy == 100_000_000


@pytest.mark.parametrize("parents", [(1, 1), (50, 50), (50, 60)])
def test_engines_in_one_container_are_kept_apart(parents: tuple[int, int]) -> None:
    """Two servers with a worker each in a system container, also below one shell."""
    host = Host("gpu0", "gpu1")
    second, helper = OTHER, Consumer(OTHER.pid + 1, OTHER.started + 1)
    host.born(SERVER, parents[0], "lxc")
    host.born(WORKER, SERVER.pid, "lxc")
    host.born(second, parents[1], "lxc")
    host.born(helper, second.pid, "lxc")
    for number in range(10):
        host.run(1, {"gpu0": (WORKER,), "gpu1": (helper, helper._replace(pid=99))})
        host.send(2 * number, 1.0)
        host.send(2 * number + 1, 1.0, sender=second, service="second")
    host.settle()

    energies = {row.service: sum(row.energy.values()) for row in host.joiner.rows}
    assert energies == {"llm": 10 * 100_000_000, "second": 10 * 100_000_000}


def test_senders_of_one_family_are_one_engine() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.born(WORKER, SERVER.pid)
    host.run(1, {"gpu0": (WORKER,)})
    host.send(1, 1.0)
    host.send(2, 1.0, sender=WORKER)
    host.settle()

    assert host.found[1].energy + host.found[2].energy == 100_000_000


def test_new_worker_is_found() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(1, {})
    host.send(1, 1.0)
    host.run(1.1, {})
    host.born(WORKER, SERVER.pid)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(2, 1.0)
    host.settle()

    assert host.found[2].energy > 90_000_000
    assert 1 not in host.found
    assert host.joiner.unmetered[0].requests == 1


def test_repeated_request_counts_once() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(1, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.send(1, 1.0)
    host.settle()

    assert host.joiner.rows[0].requests["tokens"] == 1


def test_request_of_a_clock_that_is_fast_has_its_energy() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(3, {"gpu0": (SERVER,)})
    host.send(1, 2.0, end=-0.5)  # as from a runtime whose clock drifts
    host.send(2, 2.0, end=-3600.0)
    host.run(1, {"gpu0": (SERVER,)})
    host.settle()
    assert {ident: one.energy for ident, one in host.found.items()} == {1: 25 * POWER}


def test_request_of_an_impossible_duration_takes_no_energy() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.send(2, 56 * 366 * 86_400.0)
    host.settle()

    assert {ident: one.energy for ident, one in host.found.items()} == {1: 100_000_000}
    assert host.joiner.idle == 0
    (row,) = host.joiner.unmetered
    assert (row.role, row.requests) == ("engine", 1)


def test_request_that_ends_before_it_begins_is_ignored() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.send(1, -1.0)

    assert host.joiner.waiting == 0


def test_calls_of_other_services_are_left_out() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(1, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.send(2, 1.0, details=InferenceDetails("gpt"))
    host.send(3, 1.0, details=None)
    host.settle()

    assert set(host.found) == {1}


def test_requests_without_latencies_have_energy_if_none_has() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(1, {"gpu0": (SERVER,)})
    host.send(1, 1.0, details=InferenceDetails("m"))
    host.settle()

    assert host.found[1].energy == 100_000_000


def test_unused_engine_is_released() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.run(1, {"gpu0": (SERVER,)})
    host.send(1, 1.0)
    host.run(1, {"gpu0": (SERVER,)})
    host.now += ENGINE_TIMEOUT + S
    host.joiner.turn(host.now)
    host.run(2, {"gpu0": (SERVER,)})
    idle = host.joiner.idle
    host.run(5, {"gpu0": (SERVER,)})

    assert host.joiner.idle == idle
    assert host.joiner._engines == {}


def test_engine_beyond_the_limit_replaces_the_longest_unused() -> None:
    host = Host()
    for number in range(MAX_ENGINES + 1):
        host.send(number, 1.0, sender=Consumer(1000 + number, 1))

    assert host.joiner.waiting == MAX_ENGINES + 1
    assert set(host.joiner._engines) == {
        Consumer(1000 + number, 1) for number in range(1, MAX_ENGINES + 1)
    }


@pytest.mark.parametrize("model", ["m", ""])
def test_estimate_is_known_once_the_model_is_identified(model: str) -> None:
    host = Host()
    host.born(SERVER, 1)
    host.born(WORKER, SERVER.pid)
    request = InferenceRequest.of(b"r" * 8, 0, S, (100, 11), TIMES)
    assert host.joiner.estimate(WORKER, request) is None

    chance = random.Random(1)
    for number in range(120):
        prompt, length = chance.randint(1, 3000), chance.uniform(0.3, 2.0)
        host.run(0.5, {"gpu0": (WORKER, OTHER)} if chance.random() < 0.5 else {"gpu0": (WORKER,)})
        host.run(length, {"gpu0": (WORKER,)})
        details = TIMES._replace(model=model)
        host.send(number, length, details=details, tokens=(prompt, round(50 * length)))
    host.run(FIRST_HOLD / S + 5, {"gpu0": ()})

    estimate = host.joiner.estimate(WORKER, request)
    assert 20e6 < estimate.energy < 400e6
    assert host.joiner.estimate(OTHER, request) is None
    # A response names the model even where the spans of its engine name none.
    named = host.joiner.estimate(WORKER, request._replace(model="other"))
    assert named == (None if model else estimate)


SGLANG = InferenceDetails("m", first_token=S // 2, prefill=S // 2, decode=S // 2)


def _sglang(host: Host, **stage: float) -> int:
    """The time from the start of a request to its prefill, with a stage of its trace before it."""
    host.born(SERVER, 1)
    host.born(WORKER, SERVER.pid)
    host.send(1, 3.0, sender=WORKER, details=None, name="prefill_forward", end=2.9)
    host.send(2, 0.9, sender=WORKER, details=None, name="prefill_waiting", end=0.8)
    if stage:
        host.send(3, **stage, sender=WORKER, details=None, name="prefill_forward")
    host.send(4, 1.0, details=SGLANG)
    (request,) = host.requests
    assert request.first == host.now - S // 2
    return request.start - (host.now - S)


def test_prefill_begins_with_its_first_stage() -> None:
    assert _sglang(Host(), start=0.75, end=0.5) == S // 4


def test_prefill_without_a_stage_before_the_first_token_begins_as_reported() -> None:
    assert _sglang(Host()) == 0
    assert _sglang(Host(), start=0.25, end=0.2) == 0


def test_stages_are_ignored_without_the_preset() -> None:
    assert _sglang(Host(presets=("vllm",)), start=0.75, end=0.5) == 0


def test_reported_queue_precedes_stages() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.send(1, 0.75, details=None, name="prefill_forward", end=0.5)
    host.send(2, 1.0, details=SGLANG._replace(queue=S // 10, first_token=None))

    assert host.requests[0].start == host.now - S + S // 10


LAUNCHER, SIBLING = Consumer(9, 0), Consumer(12, 3)
PLAIN = InferenceDetails("m")


def _launched(*siblings: Consumer) -> Host:
    """A server, a worker and further processes below one launcher."""
    host = Host()
    host.born(LAUNCHER, 2)
    for one in (SERVER, WORKER, *siblings):
        host.born(one, LAUNCHER.pid)
    return host


def test_gpu_user_beside_the_server_has_the_energy_of_waiting_requests() -> None:
    host = _launched()
    host.run(2, {"gpu0": (WORKER,)})
    host.send(1, 1.0)
    host.run(3, {"gpu0": (WORKER,)})
    host.settle()

    assert host.found[1].energy == 100_000_000
    assert host.joiner.idle == 300_000_000
    assert not host.joiner.unmetered


def test_requests_before_the_first_gpu_user_of_an_engine_are_unmetered() -> None:
    host = _launched()
    host.run(2, {"gpu0": ()})
    host.send(1, 1.0)
    host.run(60, {"gpu0": ()})

    assert host.joiner.rows == ()
    assert host.joiner.waiting == 0
    (row,) = host.joiner.unmetered
    assert (row.role, row.requests, row.tokens) == ("engine", 1, {"input": 100, "output": 11})


@pytest.mark.parametrize("role", [TokenRole.PLAIN, TokenRole.CALL, TokenRole.SERVER])
def test_request_from_before_the_first_gpu_use_of_its_sender_is_no_clients(role: TokenRole) -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {"gpu0": ()})
    host.send(1, 1.9, end=0.2, details=PLAIN, role=role)
    host.run(3, {"gpu0": (SERVER,)})
    host.send(2, 1.0, details=PLAIN, role=role)
    host.run(60, {"gpu0": ()})

    assert set(host.found) == {2}
    assert [(row.role, row.requests) for row in host.joiner.unmetered] == [("engine", 1)]


def test_servers_of_one_launcher_become_one_engine() -> None:
    host = _launched(SIBLING)
    host.run(2, {"gpu0": ()})
    host.send(1, 1.0)
    host.send(2, 1.0, sender=SIBLING)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(3, 1.0, sender=SIBLING)
    host.send(4, 1.0)
    host.settle()

    assert host.found[3].energy + host.found[4].energy == 100_000_000
    (row,) = host.joiner.rows
    assert sum(row.requests.values()) == 2
    assert [one.requests for one in host.joiner.unmetered] == [2]


def test_later_server_of_a_launched_engine_belongs_to_it() -> None:
    host = _launched(SIBLING)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(1, 1.0)
    host.run(2, {"gpu0": (WORKER,)})
    for ident in (2, 3):
        host.send(ident, 1.0, sender=SIBLING)
    host.run(2, {"gpu0": (WORKER,)})
    host.settle()

    assert set(host.found) == {1, 2, 3}
    assert len(host.joiner.rows) == 1


def test_unrelated_sender_below_the_launcher_ends_its_engine() -> None:
    host = _launched(SIBLING)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(1, 1.0)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(2, 1.0, sender=SIBLING, service="tool", details=PLAIN, role=TokenRole.CALL)
    host.run(2, {"gpu0": (WORKER,)})
    host.send(3, 1.0)
    host.settle()

    assert host.joiner.rows == ()
    assert {(row.service, row.role, row.requests) for row in host.joiner.unmetered} == {
        ("llm", "engine", 2), ("tool", "client", 1),
    }  # fmt: skip


def test_client_span_does_not_look_for_a_launcher() -> None:
    host = _launched()
    host.run(2, {"gpu0": (WORKER,)})
    host.send(1, 1.0, details=PLAIN, role=TokenRole.CLIENT)
    host.settle()

    (row,) = host.joiner.unmetered
    assert row.role == "client"


def test_calls_that_waited_as_requests_are_left_out_of_an_engine() -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 1.0, details=PLAIN, role=TokenRole.CLIENT)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(2, 1.0)
    host.run(60, {"gpu0": ()})

    assert set(host.found) == {2}
    (row,) = host.joiner.unmetered
    assert (row.role, row.requests) == ("client", 1)


def test_waiting_request_is_replaced_by_the_one_in_it() -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 2.0, details=PLAIN, role=TokenRole.CALL)
    host.run(1, {"gpu0": (SERVER,)})
    host.send(2, 1.9, parent=1, details=PLAIN, role=TokenRole.CALL)
    host.settle()

    assert set(host.found) == {2}
    assert not host.joiner.unmetered
    assert host.found[2].energy + host.joiner.idle == 300_000_000


def test_calls_elsewhere_are_counted_once_spans_in_them_may_have_arrived() -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {})
    host.send(1, 1.0, details=PLAIN, role=TokenRole.REMOTE)
    host.run(10, {})
    assert (host.joiner.unmetered, host.joiner.waiting) == ((), 1)
    host.run(30, {})
    (row,) = host.joiner.unmetered
    assert (row.role, row.requests, host.joiner.waiting) == ("client", 1, 0)
    after = InferenceJoiner(
        host.history,
        checkpoint=Checkpoint(host._at(host.now), "boot", unmetered=host.joiner.unmetered),
    )
    assert after.unmetered == host.joiner.unmetered


@pytest.mark.exhaustive
def test_calls_beyond_the_limit_are_counted_at_once() -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(1, {})
    for ident in range(1, MAX_REQUESTS + 4):
        host.send(ident, 0.5, details=PLAIN, role=TokenRole.REMOTE)
    assert host.joiner.waiting == MAX_REQUESTS
    assert host.joiner.unmetered[0].requests == 3


@pytest.mark.parametrize(
    ("gpu", "role", "call"),
    [
        (False, TokenRole.CLIENT, True),
        (False, TokenRole.AGGREGATE, True),
        (False, TokenRole.PLAIN, False),
        (False, TokenRole.ENGINE, False),
        (True, TokenRole.CLIENT, False),
        (True, TokenRole.REMOTE, True),
    ],
)
def test_tokens_of_a_caller_are_computed_elsewhere(
    *, gpu: bool, role: TokenRole, call: bool
) -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(1, {"gpu0": (SERVER,) if gpu else (OTHER,)})
    assert host.joiner.is_call(SERVER, role) == call
    host.send(1, 0.5, details=PLAIN, role=TokenRole.CALL)
    assert host.joiner.is_call(SERVER, role) == call


@pytest.mark.exhaustive
def test_requests_of_a_user_forget_none_of_another() -> None:
    host = Host()
    host.born(SERVER, 1)
    host.send_calls(Principal(1000), SERVER, (1,))
    host.send_calls(Principal(2000), OTHER, range(10, 40_000))
    host.send_calls(Principal(1000), SERVER, (1,))
    host.settle()
    counts = {row.owner: row.requests for row in host.joiner.unmetered}
    assert counts == {"1000": 1, "2000": 40_000 - 10}


@pytest.mark.parametrize(
    ("gpu", "calls", "requests"), [(False, 0, [1]), (False, 2, [2]), (True, 0, [])]
)
def test_agent_without_calls_in_it_is_a_client(
    *, gpu: bool, calls: int, requests: list[int]
) -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {"gpu0": (SERVER,) if gpu else (OTHER,)})
    host.send(1, 1.0, details=PLAIN, role=TokenRole.AGGREGATE)
    for ident in range(2, 2 + calls):
        host.send(ident, 0.5, parent=1, details=PLAIN, role=TokenRole.CLIENT)
    host.settle()

    found = [(row.role, row.requests) for row in host.joiner.unmetered]
    assert found == [("client", count) for count in requests]
    assert (host.joiner.rows, host.joiner.idle) == ((), 0)


@pytest.mark.exhaustive
def test_calls_of_a_user_count_no_call_of_another_early() -> None:
    host = Host()
    host.born(SERVER, 1)
    limit = PoolName.MODEL_CALLS.limit
    host.send_calls(Principal(1000), SERVER, (1,))
    host.send_calls(Principal(2000), OTHER, range(10, limit + 20))
    host.send_calls(Principal(1000), SERVER, (2,), parent=1)
    host.settle()
    counts = {row.owner: row.requests for row in host.joiner.unmetered}
    assert counts == {"1000": 1, "2000": limit + 10}


def test_request_in_a_gap_of_its_gpu_has_no_known_energy() -> None:
    host = Host()
    host.born(SERVER, 2)
    host.run(2, {"gpu0": (SERVER,)})
    host.now += S
    host.run(2, {"gpu0": (SERVER,)})
    host.send(1, 4.0, role=TokenRole.SERVER)
    host.send(2, 1.0, role=TokenRole.SERVER)
    host.settle()

    assert set(host.found) == {2}
    assert host.found[2].energy + host.joiner.idle == 300_000_000
    (row,) = host.joiner.unmetered
    assert (row.role, row.requests, row.tokens) == ("engine", 1, {"input": 100, "output": 11})


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("user", "generated", "prompt"),
    [(1000, 11, 0), (1001, 11, 100), (1000, 1, 100)],  # a score is no continuation
)
def test_prompt_that_another_engine_continues_counts_once(
    order: tuple[int, int], user: int, generated: int, prompt: int
) -> None:
    host = Host("gpu0", "gpu1")
    host.born(SERVER, 1)
    host.born(OTHER, 1)
    host.run(4, {"gpu0": (SERVER,), "gpu1": (OTHER,)})
    for ident in order:
        if ident == 1:
            host.send(1, 4.0, end=3.0, tokens=(100, 1))
        else:
            tokens = 100, generated
            host.send(2, 4.0, sender=OTHER, service="decode", user=user, tokens=tokens)
    host.settle()

    assert {row.service: row.tokens for row in host.joiner.rows} == {
        "llm": {"input": 100, "output": 1}, "decode": {"input": prompt, "output": generated},
    }  # fmt: skip
    assert host.found[1].energy + host.found[2].energy + host.joiner.idle == 800_000_000
