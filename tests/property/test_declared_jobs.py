"""Declarations of processes: bounded, never joined across users, and gone with their process."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from wattspan.api.jobs import decoded_body
from wattspan.api.requests import ProblemError
from wattspan.config import AutotuneSettings
from wattspan.model import Consumer, PayerInfo, Principal, RequestedTerms
from wattspan.testing import FakeDirectory
from wattspan.tuning.declared_jobs import (
    MAX_DECLARATIONS,
    DeclarationsFullError,
    DeclaredJobs,
    ProcessDeclaration,
)
from wattspan.tuning.permissions import JobOwner

NAMES = ("a", "b", "c")
names = st.sampled_from(NAMES)
pids = st.integers(1, 12)
declarations = st.builds(
    ProcessDeclaration,
    st.builds(Consumer, pids, st.just(1)),
    st.just(JobOwner(Principal(0))),  # the owner follows from the process
    st.just(0),
    names,
    names,
    names,
    st.sampled_from(("", "tokens", "samples", "images")),
    st.builds(RequestedTerms, st.none() | st.floats(0.0, 2.0)),
)
actions = st.lists(
    st.one_of(
        declarations,
        st.tuples(st.just("withdraw"), pids, names),
        st.tuples(st.just("end"), pids, names),
    ),
    max_size=60,
)


@given(actions, st.sampled_from(("ignore", "tighten", "allow")))
def test_declarations_follow_their_processes(
    steps: list[ProcessDeclaration | tuple[str, int, str]], permission: str
) -> None:
    directory = FakeDirectory(PayerInfo(Consumer(pid, 1), "job") for pid in range(1, 13))
    operator = AutotuneSettings(mode="apply", declared=permission)  # type: ignore[arg-type]
    jobs = DeclaredJobs(operator, directory, "instance")
    expected: dict[tuple[Consumer, str], ProcessDeclaration] = {}
    for step in steps:
        process = step.consumer if isinstance(step, ProcessDeclaration) else Consumer(step[1], 1)
        if process not in directory.infos:
            continue  # it has ended
        if isinstance(step, ProcessDeclaration):
            one = step._replace(owner=JobOwner(Principal(step.consumer.pid % 3)))
            jobs.declare(one)
            spans = one.service, one.span
            for key, other in list(expected.items()):
                same = other.name == one.name or (other.service, other.span) == spans
                if other.consumer == one.consumer and same:
                    del expected[key]
            expected[one.consumer, one.name] = one
        elif step[0] == "withdraw":
            assert jobs.withdraw(process, step[2]) == ((process, step[2]) in expected)
            expected.pop((process, step[2]), None)
        else:
            del directory.infos[process]
            expected = {key: one for key, one in expected.items() if one.consumer != process}
    found = jobs.living()
    listed = [(job.owner, job.service, job.span) for job in found]
    assert len(listed) == len(set(listed))
    processes = {(process, job.service, job.span) for job in found for process in job.processes}
    assert processes == {(one.consumer, one.service, one.span) for one in expected.values()}
    for job in found:
        assert {process.pid % 3 for process in job.processes} == {job.owner.principal.user}
        if permission != "allow":
            assert job.answer.given.max_slowdown <= operator.max_slowdown
    attributes = [(one.service, one.span) for one in jobs.work_attributes()]
    assert all(attributes.count(one) <= 3 for one in attributes)
    assert permission != "ignore" or not attributes


@settings(max_examples=5, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=MAX_DECLARATIONS, max_size=2 * MAX_DECLARATIONS))
def test_number_of_declarations_is_bounded(users: list[int]) -> None:
    directory = FakeDirectory()
    jobs = DeclaredJobs(AutotuneSettings(mode="advise"), directory, "instance")
    for number, uid in enumerate(users):
        consumer = Consumer(number + 1, 1)
        directory.infos[consumer] = PayerInfo(consumer, "job")
        with suppress(DeclarationsFullError):
            jobs.declare(
                ProcessDeclaration(
                    consumer, JobOwner(Principal(uid)), uid, "a", f"service {number}", "b"
                )
            )
    held = [job.answer.uid for job in jobs.living()]
    assert len(held) <= MAX_DECLARATIONS
    assert all(held.count(uid) <= MAX_DECLARATIONS // 2 for uid in range(4))
    assert set(held) == set(users)
    directory.infos.clear()
    assert jobs.living() == ()


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode()))
def test_no_body_crashes_the_declaration(body: bytes) -> None:
    with suppress(ProblemError):
        assert decoded_body(body) is not None
