"""A server whose load and latencies come from the page of its engine, without spans."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tracked_server import (
    ENGINE,
    JOB,
    REQUEST,
    SERVICE,
    TrackedServer,
    serve,
    tracking_by_page,
)
from testbed.tuned_host import DEFAULT, Host

from wattspan.model import SECOND, Consumer, DecisionReason, Move, Principal, TuningState

HELD = Move.HOLD, DecisionReason.CERTIFIED
BOTH = {"service": SERVICE, "span": REQUEST, "ttft": "ttft"}


def decided(host: Host, job: str = ENGINE) -> tuple[Move, DecisionReason]:
    row = host.row(job)
    return row.decision.move, row.decision.reason


@saved
def lowered(**more: int) -> tuple[Host, TrackedServer]:
    """A host with a server that sends no spans and holds a lower setting."""
    host = Host(settings=tracking_by_page(**more))
    server = serve(host, sends=False, announces=False, interval=1.0)
    host.run(180, until=lambda: host.gpus[0].cap < DEFAULT and decided(host) == HELD)
    assert host.gpus[0].cap < DEFAULT
    return host, server


def test_setting_is_lowered_by_the_page_alone() -> None:
    host, server = lowered()
    row = host.row(ENGINE)
    assert row.state is TuningState.HOLDING
    assert (row.service, row.span) == (ENGINE, "")
    assert row.load.objectives[0].misses == sum(one > 0.5 for one in server.latencies) == 0
    assert 30 <= row.load.objectives[0].requests == row.units <= len(server.latencies) + 20
    assert row.load.load == pytest.approx(server.rate * server.lasting, rel=0.6)
    assert row.decision.sentence.endswith("; from the page of its engine.")


def test_saving_is_that_of_the_energy_per_token_of_the_page() -> None:
    host, _ = lowered(dwell=30 * SECOND)
    host.run(60)
    row = host.row(ENGINE)
    assert 0.05 < row.saving < 1 - host.gpus[0].cap / 640_000 + 0.1
    assert row.saved > 0


def test_status_names_the_bound_that_stands_for_the_limit() -> None:
    host = Host(settings=tracking_by_page(0.4))
    serve(host, sends=False, announces=False, interval=1.0)
    host.run(60)
    sentence = host.row(ENGINE).decision.sentence
    assert sentence.endswith("; from the page of its engine, whose next lower bounds count: "
                             "250ms for ttft_p90.")  # fmt: skip


def test_misses_by_the_page_restore_the_original() -> None:
    host, server = lowered()
    server.first = 0.49
    host.run(60, until=lambda: host.gpus[0].cap == DEFAULT)
    assert host.gpus[0].cap == DEFAULT
    assert host.row(ENGINE).load.objectives[0].misses > 0


def test_rise_of_the_load_on_the_page_restores_the_original() -> None:
    host, server = lowered()
    server.rate *= 4
    host.run(8, until=lambda: host.gpus[0].cap == DEFAULT)
    assert host.gpus[0].cap == DEFAULT


def test_page_of_a_hanging_engine_restores_the_original() -> None:
    host, server = lowered()
    server.hangs = True
    host.run(20, until=lambda: host.gpus[0].cap == DEFAULT)
    assert decided(host) == (Move.RELEASE, DecisionReason.PAUSED)


def test_page_that_is_not_read_any_more_restores_the_original() -> None:
    host, server = lowered()
    server.interval = 0
    host.run(12, until=lambda: host.gpus[0].cap == DEFAULT)
    row = host.row(ENGINE)
    assert decided(host)[1] is DecisionReason.NO_SIGNAL
    assert host.gpus[0].cap == DEFAULT
    host.run(5)
    assert "the page of its engine was not read for" in host.row(ENGINE).decision.sentence
    assert row.units > 0


def test_end_of_the_engine_ends_the_job_in_spite_of_its_last_page() -> None:
    host, server = lowered()
    server.alive = False
    host.run(20)
    assert host.row(ENGINE).state is TuningState.ENDED
    assert host.gpus[0].cap == DEFAULT


def test_next_process_of_the_engine_is_tracked_anew() -> None:
    host, server = lowered()
    server.alive = False
    host.run(20)
    host.jobs.remove(server)
    serve(host, sends=False, announces=False, interval=1.0)
    host.run(180, until=lambda: host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT


def test_announced_spans_win_where_both_exist() -> None:
    host = Host(settings=tracking_by_page(job=BOTH))
    server = serve(host, interval=1.0)
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT and decided(host, JOB) == HELD)
    assert "from the page" not in host.row(JOB).decision.sentence
    assert host.row(ENGINE) is None
    server.announces = False
    host.run(30, until=lambda: "from the page" in host.row(JOB).decision.sentence)
    host.run(60, until=lambda: decided(host, JOB) == HELD)
    assert decided(host, JOB) == HELD
    assert "from the page" in host.row(JOB).decision.sentence
    server.announces = True
    host.run(30, until=lambda: "from the page" not in host.row(JOB).decision.sentence)
    row = host.row(JOB)
    assert row.units <= len(server.latencies) + 20  # none is counted twice


def test_page_serves_until_the_spans_are_known_to_be_announced() -> None:
    host = Host(settings=tracking_by_page(job=BOTH))
    serve(host, interval=1.0, announces=False)
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT)
    assert host.gpus[0].cap < DEFAULT
    assert host.row(JOB).service == SERVICE


def test_classes_of_lengths_need_spans() -> None:
    host = Host(settings=tracking_by_page(job={"classes": "length"}))
    serve(host, sends=False, announces=False, interval=1.0)
    host.run(20)
    assert decided(host) == (Move.DECLINE, DecisionReason.NO_SIGNAL)
    assert "`classes`" in host.row(ENGINE).decision.sentence


def test_engine_without_a_page_is_a_missing_job() -> None:
    host = Host(settings=tracking_by_page())
    serve(host, sends=False, announces=False)
    host.run(10)
    row = host.row(ENGINE)
    assert row.state is TuningState.WAITING
    assert f'page of the engine "{ENGINE}" was not read yet' in row.decision.sentence


def test_page_of_processes_without_a_proven_owner_steers_nothing() -> None:
    host = Host(settings=tracking_by_page())
    server = serve(host, sends=False, announces=False, interval=1.0)
    host.owners[server.consumer] = None
    host.run(10)
    assert "was not read yet" in host.row(ENGINE).decision.sentence


def test_load_before_tracking_begins_is_that_of_the_page() -> None:
    host = Host(settings=tracking_by_page(floor=0.95))
    server = serve(host, sends=False, announces=False, interval=1.0)
    host.run(20)
    row = host.row(ENGINE)
    assert row.decision.reason is DecisionReason.NO_ROOM
    assert row.load.load == pytest.approx(len(server.active), abs=8)
    assert row.load.load > 0


def test_page_may_be_read_less_often_than_the_period() -> None:
    host = Host(settings=tracking_by_page())
    serve(host, sends=False, announces=False, interval=4.0)
    host.run(300, until=lambda: host.gpus[0].cap < DEFAULT and decided(host) == HELD)
    assert decided(host) == HELD


def test_spans_that_stop_while_the_page_shows_requests_are_not_believed() -> None:
    """As of a frontend that is replaced by one without spans while its workers live on."""
    host = Host(settings=tracking_by_page(job=BOTH))
    server = serve(host, interval=1.0)
    host.run(120, until=lambda: host.gpus[0].cap < DEFAULT and decided(host, JOB) == HELD)
    assert "from the page" not in host.row(JOB).decision.sentence
    server.announces = server.sends = False
    host.run(20, until=lambda: "from the page" in host.row(JOB).decision.sentence)
    server.first = 0.49
    host.run(60, until=lambda: host.gpus[0].cap == DEFAULT)
    assert host.gpus[0].cap == DEFAULT
    server.interval = 0  # also without the page, the spans of the past are no evidence
    host.run(20)
    assert host.gpus[0].cap == DEFAULT


def test_processes_of_another_owner_are_no_part_of_the_job() -> None:
    host = Host(settings=tracking_by_page())
    server = serve(host, sends=False, announces=False, interval=4.0)
    other = Consumer(999, 1)
    host.owners[other] = None
    server.workers = (other,)
    host.run(100, until=lambda: ENGINE in host.evidence.kept)
    processes, policy, _ = host.evidence.kept[ENGINE]
    assert processes == {server.consumer}
    assert policy.period == 4 * SECOND  # the interval of its page


def test_page_of_several_possible_owners_is_declined() -> None:
    host = Host(settings=tracking_by_page())
    server = serve(host, sends=False, announces=False, interval=1.0, hidden=True)
    other = Consumer(999, 1)
    host.owners[other] = Principal(4711)
    server.workers = (other,)
    host.run(10)
    row = host.row(ENGINE)
    assert row.state is TuningState.WAITING
    assert "several owners" in row.decision.sentence
    server.hidden = False
    host.run(10)
    assert "from the page of its engine" in host.row(ENGINE).decision.sentence


def test_process_of_another_owner_restores_the_original_while_the_listener_is_unknown() -> None:
    host, server = lowered()
    server.hidden = True
    host.run(10)
    assert decided(host) == HELD
    host.owners[Consumer(999, 1)] = Principal(4711)
    server.workers = (Consumer(999, 1),)
    host.run(5)
    row = host.row(ENGINE)
    assert (row.decision.move, row.decision.reason) == (Move.RELEASE, DecisionReason.NO_SIGNAL)
    assert "several owners" in row.decision.sentence
    assert host.gpus[0].cap == DEFAULT
