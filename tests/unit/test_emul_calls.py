"""What a demo's jobs tell of their work: as many spans as pieces of work, when they were."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from wattspan.emulation.calls import Progress, Requests, Steps, Teller
from wattspan.emulation.gpu_work import Serving, Training

LOOK = 40_000_000


def test_training_is_told_as_one_step_after_the_other() -> None:
    work, steps, calls = Training(step=0.5, noise=0.1, seed=3), Steps(), []
    for turn in range(200):
        calls += steps.see(Progress(turn * LOOK, work.done, work.done))
        work = work.after(LOOK, 1.0)
    assert len(calls) == work.steps - 1  # nobody saw the first begin
    assert all(before.end == after.start for before, after in pairwise(calls))
    assert {call.name for call in calls} == {"train_step"}
    assert all(0.3e9 < call.end - call.start < 0.8e9 for call in calls)


def test_every_request_is_told_once_after_it_came_and_with_its_tokens() -> None:
    work, requests, calls = Serving(rate=20.0, cost=0.03), Requests(), []
    for turn in range(500):
        calls += requests.see(Progress(turn * LOOK, work.done, work.arrived))
        work = work.after(LOOK, 1.0)
    assert len(calls) + len(requests.waiting) == round(work.arrived)
    assert len(calls) > 300
    for call in calls:
        assert call.start <= call.end
        assert call.attributes["gen_ai.usage.output_tokens"]
    assert [call.end for call in calls] == sorted(call.end for call in calls)


def test_a_job_goes_on_without_an_agent(tmp_path: Path) -> None:
    teller = Teller(tmp_path / "nobody.sock", "trainer")
    for call in Steps(Progress(0, 0.5, 0.5), began=0).see(Progress(LOOK, 3.5, 3.5)):
        teller.tell(call)
    teller.send(1)
    assert len(teller._waiting) == 3
