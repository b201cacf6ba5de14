"""Declarations of processes, joined to jobs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.ingest.export_request import WorkAttribute
from wattspan.model import (
    Consumer,
    DeclarationOutcome,
    DeclaredTerms,
    Group,
    GroupKind,
    PayerInfo,
    Principal,
    RequestedTerms,
)
from wattspan.ports import ProcessDirectory
from wattspan.tuning.declared_jobs import (
    MAX_DECLARATIONS,
    DeclarationsFullError,
    DeclaredJobs,
    ProcessDeclaration,
)
from wattspan.tuning.permissions import JobOwner

ANN, BOB = 1000, 2000


@dataclass
class Processes(ProcessDirectory):
    """A directory of the processes that tests have started."""

    started: dict[int, int] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()

    def start(self, pid: int, at: int = 1) -> Consumer:
        self.started[pid] = at
        return Consumer(pid, at)

    def identify(self, pid: int) -> Consumer | None:
        return Consumer(pid, self.started[pid]) if pid in self.started else None

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return PayerInfo(consumer, "python", self.groups)


@pytest.fixture
def processes() -> Processes:
    return Processes()


def registry(processes: Processes, **settings: object) -> DeclaredJobs:
    return DeclaredJobs(AutotuneSettings(mode="advise", **settings), processes, "instance")  # type: ignore[arg-type]


def declare(
    jobs: DeclaredJobs,
    consumer: Consumer,
    uid: int = ANN,
    *,
    name: str = "train",
    service: str = "trainer",
    work: str = "",
    **asked: object,
) -> DeclaredTerms:
    terms = RequestedTerms(**asked)  # type: ignore[arg-type]
    return jobs.declare(
        ProcessDeclaration(
            consumer, JobOwner(Principal(uid)), uid, name, service, "train_step", work, terms
        )
    )


def test_declared_job_has_settings_as_if_it_was_configured(processes: Processes) -> None:
    jobs = registry(processes)
    terms = declare(jobs, processes.start(7), work="samples", max_slowdown=0.03, objective="time")
    (job,) = jobs.tuned()
    assert job.terms.job == TunedJobSettings(
        service="trainer", span="train_step", work="samples", max_slowdown=0.03
    )
    assert (job.terms.host.objective, job.terms.host.max_slowdown) == ("time", 0.05)
    assert (job.owner.principal.user, job.processes, job.answer) == (ANN, (Consumer(7, 1),), terms)
    assert jobs.work_attributes() == (WorkAttribute("samples", "trainer", "train_step"),)


def test_configured_settings_of_a_declared_job_stay(processes: Processes) -> None:
    named = TunedJobSettings(span="train_step", work="tokens.n", kind="steps", max_slowdown=0.02)
    jobs = registry(processes, job=(named,))
    terms = declare(jobs, processes.start(7), work="samples", max_slowdown=0.03)
    assert (terms.given.max_slowdown, terms.decision) == (0.02, DeclarationOutcome.LIMITED)
    (job,) = jobs.tuned()
    assert (job.terms.job.work, job.terms.job.kind) == ("tokens.n", "steps")
    assert job.terms.job.service == "trainer"
    assert set(jobs.work_attributes()) == {
        WorkAttribute("tokens.n", "trainer", "train_step"),
        WorkAttribute("tokens.n", "", "train_step"),
    }


def test_second_declaration_of_a_process_replaces_the_first(processes: Processes) -> None:
    jobs, process = registry(processes), processes.start(7)
    declare(jobs, process, max_slowdown=0.01)
    declare(jobs, process, max_slowdown=0.03)
    declare(jobs, process, name="other name of the same spans", max_slowdown=0.04)
    (job,) = jobs.living()
    assert (job.answer.given.max_slowdown, len(job.processes)) == (0.04, 1)
    declare(jobs, process, name="other name of the same spans", service="other")
    assert [one.service for one in jobs.living()] == ["other"]


def test_replaced_declaration_keeps_its_precedence(processes: Processes) -> None:
    jobs, first = registry(processes), processes.start(7)
    declare(jobs, first, objective="time")
    declare(jobs, processes.start(8), objective="cost")
    assert declare(jobs, first, objective="energy").decision is DeclarationOutcome.ACCEPTED
    (job,) = jobs.living()
    assert job.answer.given.objective == "energy"


def test_equal_declaration_changes_nothing(processes: Processes) -> None:
    jobs, process = registry(processes), processes.start(7)
    terms = declare(jobs, process, work="samples")
    (job,), work = jobs.living(), jobs.work_attributes()
    assert declare(jobs, process, work="samples") == terms
    assert jobs.living()[0] is job
    declare(jobs, processes.start(8), service="other")
    assert jobs.work_attributes() is work


def test_processes_of_one_user_are_ranks_of_one_job(processes: Processes) -> None:
    jobs = registry(processes)
    declare(jobs, processes.start(7), max_slowdown=0.03)
    second = declare(jobs, processes.start(8), max_slowdown=0.04)
    assert (second.given.max_slowdown, second.decision) == (0.03, DeclarationOutcome.LIMITED)
    (job,) = jobs.living()
    assert [one.pid for one in job.processes] == [7, 8]
    assert job.answer.decision is DeclarationOutcome.ACCEPTED


def test_processes_of_different_users_are_never_joined(processes: Processes) -> None:
    jobs = registry(processes)
    declare(jobs, processes.start(7), ANN, max_slowdown=0.03)
    declare(jobs, processes.start(8), BOB, max_slowdown=0.04)
    found = [(job.answer.uid, job.answer.given.max_slowdown) for job in jobs.living()]
    assert found == [(ANN, 0.03), (BOB, 0.04)]


def test_second_work_attribute_of_another_user_is_declined(processes: Processes) -> None:
    jobs = registry(processes)
    declare(jobs, processes.start(7), ANN, work="samples")
    same = declare(jobs, processes.start(8), BOB, work="samples")
    assert same.decision is DeclarationOutcome.ACCEPTED
    other = declare(jobs, processes.start(9), BOB + 1, work="images")
    assert (other.decision, other.given.mode) == (DeclarationOutcome.DECLINED, "off")
    assert 'counts the work of such spans by "samples"' in other.reason
    assert jobs.work_attributes()[0].attribute == "samples"
    for pid in (7, 8):
        del processes.started[pid]
    (job,) = jobs.living()
    assert job.answer.decision is DeclarationOutcome.ACCEPTED


def test_declaration_ends_with_its_process(processes: Processes) -> None:
    jobs = registry(processes)
    declare(jobs, processes.start(7), work="samples")
    processes.start(7, at=2)  # another process with its pid
    assert jobs.living() == jobs.tuned() == jobs.work_attributes() == ()


def test_declaration_is_withdrawn_by_its_process_only(processes: Processes) -> None:
    jobs, process, other = registry(processes), processes.start(7), processes.start(8)
    declare(jobs, process)
    assert not jobs.withdraw(other, "train")
    assert not jobs.withdraw(process, "trian")
    assert jobs.withdraw(process, "train")
    assert not jobs.withdraw(process, "train")
    assert jobs.living() == ()


def test_thousands_of_ended_processes_leave_no_declaration(processes: Processes) -> None:
    jobs = registry(processes)
    for pid in range(1, 5000):
        declare(jobs, processes.start(pid), service=f"service {pid}")
        del processes.started[pid]
    last = processes.start(5000)
    declare(jobs, last)
    assert [one.processes for one in jobs.living()] == [(last,)]


def test_process_that_cannot_be_read_keeps_its_declaration(processes: Processes) -> None:
    jobs = registry(processes)
    processes.has_ended = lambda consumer: False  # type: ignore[method-assign]
    process = processes.start(1)
    declare(jobs, process)
    processes.started.clear()
    for number in range(2, MAX_DECLARATIONS):
        with suppress(DeclarationsFullError):
            declare(jobs, Consumer(number, 1), service=f"service {number}")
    assert process in jobs.living()[0].processes


def test_user_has_half_of_the_declarations_at_most(processes: Processes) -> None:
    jobs = registry(processes)
    for number in range(MAX_DECLARATIONS // 2):
        declare(jobs, processes.start(number + 1), ANN, service=f"service {number}")
    with pytest.raises(DeclarationsFullError):
        declare(jobs, processes.start(9000), ANN)
    declare(jobs, processes.start(9001), BOB)
    declare(jobs, Consumer(1, 1), ANN, service="service 0", max_slowdown=0.01)  # a replacement
    (changed,) = [one for one in jobs.living() if one.service == "service 0"]
    assert changed.answer.given.max_slowdown == 0.01
    with pytest.raises(DeclarationsFullError):
        declare(jobs, Consumer(9000, 1), ANN)
    assert len(jobs.living()) == MAX_DECLARATIONS // 2 + 1
    del processes.started[1]
    declare(jobs, Consumer(9000, 1), ANN)
    assert len(jobs.living()) == MAX_DECLARATIONS // 2 + 1


def test_full_registry_has_no_jobs_of_ended_processes(processes: Processes) -> None:
    jobs = registry(processes)
    for number in range(MAX_DECLARATIONS // 2):
        declare(jobs, processes.start(number + 1), ANN, service=f"service {number}")
    declare(jobs, processes.start(9001), BOB, service="ended", work="w")
    del processes.started[9001]
    with pytest.raises(DeclarationsFullError):
        declare(jobs, processes.start(9000), ANN)
    assert "ended" not in [one.service for one in jobs.living()]
    assert jobs.work_attributes() == ()


def test_process_outside_the_permitted_groups_is_declined(processes: Processes) -> None:
    jobs = registry(processes, groups=("container:train",))
    declined = declare(jobs, processes.start(7))
    assert (declined.decision, declined.given.mode) == (DeclarationOutcome.DECLINED, "off")
    assert "process 7 is in none of [autotune] groups (container:train)" in declined.reason
    processes.groups = (Group(GroupKind.CONTAINER, "train"),)
    assert declare(jobs, processes.start(8), BOB).decision is DeclarationOutcome.ACCEPTED


def test_ignored_declarations_are_listed_without_effect(processes: Processes) -> None:
    jobs = registry(processes, declared="ignore")
    ignored = declare(jobs, processes.start(7), work="samples", max_slowdown=0.01)
    assert ignored.decision is DeclarationOutcome.IGNORED
    assert [one.answer for one in jobs.living()] == [ignored]
    assert jobs.tuned() == jobs.work_attributes() == ()
