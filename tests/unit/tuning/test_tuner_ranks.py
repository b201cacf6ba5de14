"""A synchronous job on several GPUs: one cap for all ranks, then less for those that wait."""

from __future__ import annotations

import pytest
from testbed.saved_state import saved
from testbed.tuned_host import DEFAULT, Host
from testbed.tuned_ranks import Together, synchronous, train_together

from wattspan.config import TunedJobSettings
from wattspan.model import CapKey, DecisionReason, Knob, Move

HOUR = 3600
UNEVEN = (0.1, 0.088)


def holds(host: Host, *, uneven: bool) -> bool:
    row = host.row()
    if row is None or row.decision.move is not Move.HOLD:
        return False
    return (len(set(row.decision.caps.values())) > 1) is uneven


@saved
def lowered(*, uneven: bool) -> tuple[Host, Together]:
    """Ranks whose certified caps are alike, or lower for the one that waits."""
    if uneven:
        host, job = lowered(uneven=False)
    else:
        host = Host(gpus=2, settings=synchronous())
        job = train_together(host, UNEVEN)
    host.run(HOUR, until=lambda: holds(host, uneven=uneven))
    return host, job


def test_ranks_of_a_job_get_one_cap_that_keeps_the_step_of_all_within_the_budget() -> None:
    host, job = lowered(uneven=False)
    row = host.row()
    assert row.decision.reason is DecisionReason.CERTIFIED
    assert row.devices == ("GPU-0", "GPU-1")
    assert 1.0 < job.slowdown < 1.05
    assert row.slowdown_bound <= 0.05
    assert row.units == pytest.approx(job.steps, abs=20)


def test_waiting_rank_is_lowered_without_longer_steps() -> None:
    host, job = lowered(uneven=False)
    alike, power = job.slowdown, job.power
    host.run(HOUR, until=lambda: holds(host, uneven=True))
    row = host.row()
    assert host.gpus[1].cap < host.gpus[0].cap < DEFAULT
    assert job.slowdown <= min(alike * 1.01, 1.05)
    assert job.power < 0.97 * power
    assert row.slowdown_bound <= 0.05
    assert "where ranks wait" in row.decision.sentence
    remembered = next(iter(host.memory.kept.values()))
    assert remembered.level == host.gpus[0].cap
    assert remembered.levels == {gpu.device: gpu.cap for gpu in host.gpus}


def decided(host: Host) -> tuple[Move, DecisionReason] | None:
    row = host.row()
    return (row.decision.move, row.decision.reason) if row is not None else None


@pytest.mark.slow
def test_ranks_without_waiting_return_to_one_cap() -> None:
    host, job = lowered(uneven=True)
    alike = host.gpus[0].cap
    job.loads[:] = [0.1, 0.1]
    before = job.steps
    host.run(HOUR, until=lambda: decided(host) == (Move.RELEASE, DecisionReason.CHANGED))
    assert host.gpus[1].cap == DEFAULT
    assert job.steps - before < 250
    host.run(HOUR, until=lambda: holds(host, uneven=False))
    assert [gpu.cap for gpu in host.gpus] == [alike, alike]
    assert 1.0 < job.slowdown < 1.05


@pytest.mark.slow
@pytest.mark.parametrize(("loads", "compute"), [((0.1, 0.1), "compute"), (UNEVEN, "")])
def test_ranks_that_are_not_known_to_wait_keep_one_cap(
    loads: tuple[float, ...], compute: str
) -> None:
    job = TunedJobSettings(service="trainer", span="train_step", kind="steps", compute=compute)
    host = Host(gpus=2, settings=synchronous(job=(job,)))
    train_together(host, loads)
    host.run(900)
    caps = [one.decision.caps for one in host.book.decided if one.decision.caps]
    assert caps
    assert all(len(set(one.values())) == 1 for one in caps)


@pytest.mark.slow
def test_foreign_write_to_one_rank_releases_all() -> None:
    host, _ = lowered(uneven=True)
    host.capper.foreign.add("GPU-1")
    host.gpus[1].cap = 650_000
    host.run(5)
    row = host.row()
    assert row.decision.reason is DecisionReason.FOREIGN_WRITER
    assert host.gpus[0].cap == DEFAULT
    assert host.gpus[1].cap == 650_000
    assert CapKey(Knob.GPU_POWER, "GPU-0") in {one.state.key for one in host.capper.rows()}
    assert not host.capper.holders


@pytest.mark.exhaustive
def test_ended_rank_makes_a_new_job_and_releases_its_device() -> None:
    host, _ = lowered(uneven=False)
    assert host.gpus[1].cap < DEFAULT
    host.jobs[1].alive = False
    host.run(HOUR, until=lambda: host.gpus[1].cap == DEFAULT)
    host.run(300)
    row = host.row()
    assert row.devices == ("GPU-0",)
    assert host.gpus[1].cap == DEFAULT
    assert row.decision.reason in (
        DecisionReason.CERTIFYING,
        DecisionReason.CERTIFIED,
        DecisionReason.SCREENING,
    )
