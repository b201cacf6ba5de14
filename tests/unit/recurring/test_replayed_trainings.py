"""The batch-size optimizer in a replay of published trainings."""

from __future__ import annotations

import pytest
from testbed.recurring_trainings import COMPUTED, Job, jobs, zeus

from wattspan.recurring.jobs import choose

JOBS = list(jobs())


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.name} on {job.gpu}")
def test_optimizer_meets_its_goals_and_is_no_worse_than_the_published_rules(job: Job) -> None:
    own, peer = job.replay(choose, 20, 60), job.replay(zeus, 20, 60)
    assert own.last <= 1.04
    assert own.all <= 1.23
    assert own.failures <= peer.failures
    assert own.all <= peer.all + 0.01
    assert own.saved >= COMPUTED[job.gpu, job.name] - 0.02
