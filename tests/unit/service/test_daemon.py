"""Reports of failures by the daemon: threads and sources."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from wattspan.model import (
    SECOND,
    Domain,
    DomainAccount,
    Failure,
    HwType,
    Instant,
    Microjoules,
    Provenance,
    Snapshot,
    SourceHealth,
    Trouble,
)
from wattspan.ports import SourceError
from wattspan.service.agent import ServiceGroup, merge_failures, require_readable_counters
from wattspan.service.daemon import (
    REPEAT_INTERVAL,
    SHOWN_FOR,
    THREADS,
    FailureReporter,
    HealthWatch,
    ThreadFailures,
    report_thread_failures,
)
from wattspan.testing import ManualClock
from wattspan.util.process import LONGEST_RESTART


def run(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="a part")
    thread.start()
    thread.join()


def test_failing_thread_is_reported() -> None:
    told: list[str] = []
    with report_thread_failures(lambda name, error: told.append(f"{name}: {error!r}")):
        run(lambda: [][0])
    assert told == ["a part: IndexError('list index out of range')"]


def test_thread_that_returns_or_exits_is_not_reported() -> None:
    told: list[str] = []

    def leave() -> None:
        raise SystemExit

    with report_thread_failures(lambda name, _: told.append(name)):
        run(lambda: None)
        run(leave)
    assert told == []


def test_thread_hook_is_restored_afterwards() -> None:
    before = threading.excepthook
    with report_thread_failures(lambda *_: None):
        assert threading.excepthook is not before
    assert threading.excepthook is before


def test_failed_service_thread_is_counted_and_runs_again() -> None:
    runs, lines, again = list[int](), list[str](), threading.Event()
    clock = ManualClock()
    failures = ThreadFailures(clock, lines.append)

    def work(stop: threading.Event) -> None:
        runs.append(1)
        if len(runs) == 1:
            int("9" * 5000)
        again.set()
        stop.wait()

    group = ServiceGroup("parts")
    group.add_thread("wattspan-part", work)
    with report_thread_failures(failures.record):
        group.start()
        assert again.wait(30)
        group.stop()
    (health,) = failures.health()
    assert (health.up, health.failed, len(lines)) == (False, 1, 1)
    assert "wattspan-part" in lines[0]
    clock.advance(ns=SHOWN_FOR)
    assert not failures.health()[0].up  # it may have waited for its restart
    clock.advance(LONGEST_RESTART)
    (later,) = failures.health()
    assert (later.up, later.failed, later.failures) == (True, 1, ())


def test_ended_thread_is_shown_until_the_parts_are_started_anew() -> None:
    clock = ManualClock()
    failures = ThreadFailures(clock, lambda _: None)
    with report_thread_failures(failures.record):
        run(lambda: [][0])
    clock.advance(ns=1000 * SHOWN_FOR)
    (health,) = failures.health()
    assert (health.source, health.up) == (THREADS, False)
    assert "Restart the agent" in health.failures[0].remedy
    failures.forget_ended()
    assert failures.health()[0].up


SENT = ("forward", "forward_logs", "otlp")
"""Names of the transports to a collector."""


def failing(
    thing: str, trouble: Trouble = Trouble.DENIED, cause: str = "permission denied"
) -> Failure:
    return Failure("rapl", thing, trouble, cause, "Allow it.", domain_id=thing)


def health(*failures: Failure, source: str = "rapl", up: bool = False) -> SourceHealth:
    return SourceHealth(source, up, 1, len(failures), failures)


def test_equal_failures_are_merged_into_one_sentence() -> None:
    failures = [failing("/a"), failing("/b"), failing("/c", cause="it is gone"), failing("/d")]
    assert [str(failure) for failure in merge_failures(failures)] == [
        "Cannot read /a and 2 more: permission denied. Allow it.",
        "Cannot read /c: it is gone. Allow it.",
    ]


def test_repeated_failure_is_logged_once_per_interval() -> None:
    said: list[str] = []
    troubles = FailureReporter(said.append)
    for second in range(0, 1300):
        broken = health(failing("/a", cause=f"{second} bytes")) if second % 3 else health()
        troubles.report([broken], second * SECOND)
    assert len(said) == 1300 * SECOND // REPEAT_INTERVAL + 1
    troubles.report([health(failing("/b"))], 1300 * SECOND)
    assert said[-1] == "Cannot read /b: permission denied. Allow it."


def test_failure_that_others_report_is_not_logged() -> None:
    said: list[str] = []
    troubles = FailureReporter(said.append, known=["/a"])
    elsewhere = [health(failing("/b"), source=source) for source in ("store", "files", *SENT)]
    troubles.report([health(failing("/a")), *elsewhere], 0)
    assert said == []


def test_main_thread_is_woken_only_by_other_failures_or_devices() -> None:
    shown, woken, alive = [Snapshot(Instant(0, 0), 1, "h")], list[int](), list[int]()
    watch = HealthWatch(lambda: alive.append(1))
    watch()
    watch.attach(lambda: shown[-1], lambda: woken.append(shown[-1].sequence))
    lost = Failure("rapl", "energy_uj", Trouble.RETRY, "busy for 3 s")
    domain = Domain("cpu", HwType.CPU, "package-0", "rapl", Provenance.MEASURED)
    healths = [
        SourceHealth("rapl", True, 1, 0),
        SourceHealth("rapl", True, 2, 0),
        SourceHealth("rapl", False, 3, 1, (lost,)),
        SourceHealth("rapl", False, 4, 2, (replace(lost, cause="busy for 4 s"),)),
        SourceHealth("rapl", True, 5, 2),
    ]
    for number, health in enumerate(healths):
        shown.append(Snapshot(Instant(number, 0), number, "h", health=(health,)))
        watch()
        watch()
    account = DomainAccount(domain)
    for number in (5, 6, 7):
        account = replace(account, energy=Microjoules(number), present=number < 7)
        shown.append(replace(shown[-1], sequence=number, domains=(account,)))
        watch()
    assert woken == [0, 2, 4, 5, 7]
    assert len(alive) == 1 + 2 * len(healths) + 3


def test_only_denied_access_to_every_counter_ends_the_agent() -> None:
    processes = health(source="processes")
    names = ("files", *SENT, "cost", "carbon", "pods", "engine:chat")
    others = [health(source=source, up=True) for source in names]
    with pytest.raises(SourceError, match=r"and 1 more: permission denied\. Allow it\."):
        require_readable_counters([health(failing("/a"), failing("/b")), processes, *others])
    require_readable_counters([health(failing("/a"), up=True), processes])
    require_readable_counters(
        [health(failing("/a")), health(source="nvml"), processes]
    )  # not yet known
    require_readable_counters([health(failing("/a", Trouble.RETRY)), processes])
    require_readable_counters([processes])
