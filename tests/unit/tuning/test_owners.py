"""Units of work that claim another's service and span names, and the jobs that they steer."""

from __future__ import annotations

import functools

import pytest
from testbed.tuned_host import DEFAULT, Host, Job, quick

from wattspan.config import TunedJobSettings
from wattspan.model import Consumer, Group, GroupKind, PayerInfo, Principal
from wattspan.testing import FakeDirectory
from wattspan.tuning.permissions import JobOwner, ProcessOwners, job_owner

ANN, BOB = Principal(1000), Principal(2000)
JOB = "trainer/train_step"
INSIDE = Principal(1000, "0123456789abcdef")
POD = Principal(None, pod="6f1c")


def slurm(number: int) -> tuple[Group, ...]:
    return (Group(GroupKind.JOB, str(number)),)


def claimed(
    host: Host, owner: Principal | None, gpu: int = 1, groups: tuple[Group, ...] = ()
) -> Job:
    """A process of ``owner`` whose spans have the names of the configured job."""
    job = host.train(gpu=gpu)
    host.owners[job.consumer], host.groups[job.consumer] = owner, groups
    return job


def jobs(host: Host) -> dict[str, tuple[str, ...]]:
    return {one.job: one.devices for one in host.tuner.accounts().rows}


OTHERS = [
    pytest.param(BOB, (), "2000", id="user"),
    pytest.param(INSIDE, (), "1000.0123456789ab", id="container"),
    pytest.param(POD, (), "6f1c", id="pod"),
    pytest.param(ANN, slurm(8), "1000.8", id="slurm-job"),
]


@pytest.mark.parametrize(("owner", "groups", "label"), OTHERS)
def test_units_of_another_owner_are_those_of_another_job(
    owner: Principal, groups: tuple[Group, ...], label: str
) -> None:
    host = Host(2)
    claimed(host, ANN, gpu=0, groups=slurm(7))
    claimed(host, owner, groups=groups)
    host.run(60)
    assert jobs(host) == {JOB: ("GPU-0",), f"{JOB}@{label}": ("GPU-1",)}


def test_span_that_is_named_like_another_owners_job_does_not_take_its_place() -> None:
    spans = "train_step", "train_step@1000"
    settings = (TunedJobSettings(service="trainer", span=one, kind="steps") for one in spans)
    host = Host(3, settings=quick(job=tuple(settings)))
    for gpu, span in enumerate(spans):
        host.owners[host.train(gpu=gpu, span=span).consumer] = BOB
    host.run(10)
    claimed(host, ANN, gpu=2)
    host.run(60)
    assert jobs(host).keys() == {JOB, f"{JOB}@1000", f"{JOB}@1000#2"}
    assert jobs(host)[f"{JOB}@1000#2"] == ("GPU-2",)


@functools.cache
def outcome(
    forger: Principal | None = None, groups: tuple[Group, ...] = ()
) -> tuple[int, str, int]:
    """Units, decision and cap of Ann's job, beside units of its names that the forger sends."""
    host = Host(1, packages=1)
    claimed(host, ANN, gpu=0)
    if forger:
        job = host.compute(step=0.013, noise=0.5)
        host.owners[job.consumer], host.groups[job.consumer] = forger, groups
    host.run(120)
    row = host.row(JOB)
    return row.units, row.decision.sentence, host.gpus[0].cap


@pytest.mark.parametrize(("owner", "groups", "label"), OTHERS)
def test_units_of_another_owner_do_not_affect_the_job_of_these_names(
    owner: Principal, groups: tuple[Group, ...], label: str
) -> None:
    assert outcome(owner, groups) == outcome()


def test_process_without_a_principal_has_no_job() -> None:
    host = Host(2, settings=quick())
    claimed(host, None, gpu=0)
    host.run(60)
    assert all(not one.devices and not one.units for one in host.tuner.accounts().rows)
    assert host.gpus[0].cap == DEFAULT


def test_processes_of_one_owner_are_ranks_of_one_job() -> None:
    host = Host(2)
    for gpu in range(2):
        claimed(host, ANN, gpu=gpu, groups=slurm(7))
    host.run(60)
    assert jobs(host) == {JOB: ("GPU-0", "GPU-1")}


def test_owner_is_unknown_without_a_proven_principal() -> None:
    process = Consumer(7, 1)
    assert job_owner(None) is None
    assert job_owner(PayerInfo(process, "python", slurm(7))) is None


def test_owner_of_an_ended_process_stays() -> None:
    process = Consumer(7, 1)
    directory = FakeDirectory([PayerInfo(process, "python", slurm(7), principal=ANN)])
    owners = ProcessOwners(directory)
    assert owners(process) == JobOwner(ANN, "7")
    directory.infos.clear()
    assert owners(process) == JobOwner(ANN, "7")
    assert owners(Consumer(8, 1)) is None


def test_owners_of_many_processes_are_bounded() -> None:
    infos = [PayerInfo(Consumer(pid, 1), "python", principal=ANN) for pid in range(1, 2000)]
    owners = ProcessOwners(FakeDirectory(infos))
    assert {owners(one.payer) for one in infos if isinstance(one.payer, Consumer)} == {
        JobOwner(ANN)
    }
