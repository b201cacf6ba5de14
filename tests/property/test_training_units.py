"""Invariants of the units of work of a training run, for any order of hooks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wattspan.training.units import (
    EPOCH,
    STEP,
    STEP_PART,
    Events,
    StepEvent,
    StepTracker,
    StepWork,
)

works = st.none() | st.builds(
    StepWork, st.integers(1, 1000), st.sampled_from(["tokens", "samples"])
)


class HooksInAnyOrder(RuleBasedStateMachine):
    """The spans that a tracker begins and ends, beside a count of the hooks that matter."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = StepTracker()
        self.open: list[StepEvent] = []
        self.ended: list[StepEvent] = []
        self.moves = 0  # of the optimizer, in steps that have begun
        self.moving = False  # a step has begun, and its optimizer has not moved

    def see(self, events: Events) -> None:
        for event in events:
            if event.action == "begin":
                assert event.work is None
                self.open.append(event)
            else:
                begun = self.open.pop()  # spans end in the reverse order of their begins
                assert begun.number == event.number
                assert (begun.name == EPOCH) == (event.name == EPOCH)
                self.ended.append(event)

    @rule()
    def begin_epoch(self) -> None:
        self.see(self.tracker.begin_epoch())
        self.moving = False
        assert [each.name for each in self.open] == [EPOCH]

    @rule()
    def end_epoch(self) -> None:
        self.see(self.tracker.end_epoch())
        self.moving = False
        assert self.open == []

    @rule()
    def begin_step(self) -> None:
        self.see(self.tracker.begin_step())
        self.moving = True
        assert self.open[-1].name == STEP

    @rule(work=works)
    def add_work(self, work: StepWork | None) -> None:
        self.tracker.add_work(work)

    @rule(work=works)
    def complete_step(self, work: StepWork | None) -> None:
        self.tracker.complete_step(work)
        self.moves += self.moving
        self.moving = False

    @rule()
    def interrupt(self) -> None:
        self.see(self.tracker.interrupt())
        self.moving = False
        assert STEP not in [each.name for each in self.open]

    @rule(steps=st.integers(0, 50))
    def continue_after(self, steps: int) -> None:
        if not self.open:
            self.tracker.continue_after(steps)

    @invariant()
    def in_step_is_between_begin_and_move(self) -> None:
        assert self.tracker.in_step == self.moving

    @invariant()
    def at_most_one_unit_is_open(self) -> None:
        assert [each.name for each in self.open] in ([], [EPOCH], [STEP], [EPOCH, STEP])

    @invariant()
    def numbers_of_units_increase(self) -> None:
        numbers = [each.number for each in self.ended if each.name == STEP]
        assert numbers == sorted(set(numbers))

    def teardown(self) -> None:
        self.see(self.tracker.stop())
        assert self.open == []
        assert len([each for each in self.ended if each.name == STEP]) == self.moves
        units = [each.work for each in self.ended if each.name == STEP and each.work]
        assert len({work.kind for work in units}) <= 1  # amounts can be compared
        assert all(work.amount > 0 for work in units)


TestHooksInAnyOrder = HooksInAnyOrder.TestCase


@st.composite
def trainings(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Epochs: batches, batches of a step, and whether an evaluation follows every batch."""
    epoch = st.tuples(st.integers(0, 12), st.integers(1, 4), st.booleans())
    return draw(st.lists(epoch, max_size=4))


@given(epochs=trainings())
def test_every_optimizer_step_is_one_unit(epochs: list[tuple[int, int, bool]]) -> None:
    """Gradient accumulation with evaluations in mid-step: exact counts and exact work."""
    tracker, seen = StepTracker(), list[StepEvent]()
    expected, samples = 0, 0
    for batches, accumulate, evaluates in epochs:
        seen += tracker.begin_epoch()
        for batch in range(1, batches + 1):
            seen += tracker.begin_step()
            tracker.add_work(StepWork(8, "samples"))
            if batch % accumulate == 0 or batch == batches:
                tracker.complete_step()
                expected += 1
                samples += 8 if evaluates else 8 * (1 + (batch - 1) % accumulate)
            if evaluates:
                seen += tracker.interrupt()
        seen += tracker.end_epoch()
    units = [each for each in seen if each.action == "end" and each.name == STEP]
    assert [each.number for each in units] == list(range(1, expected + 1))
    assert sum(each.work.amount for each in units if each.work) == samples
    assert len([each for each in seen if each.action == "end" and each.name == EPOCH]) == len(
        epochs
    )
    parts = [each for each in seen if each.name == STEP_PART]
    assert bool(parts) == any(
        evaluates and accumulate > 1 and batches > 1 for batches, accumulate, evaluates in epochs
    )


@given(before=st.integers(0, 5), checkpoint=st.integers(0, 10))
def test_numbers_continue_after_the_checkpoint_and_repeat_none(
    before: int, checkpoint: int
) -> None:
    tracker = StepTracker()

    def step() -> int:
        tracker.begin_step()
        tracker.complete_step()
        return tracker.interrupt()[-1].number

    earlier = [step() for _ in range(before)]
    tracker.continue_after(checkpoint)
    assert step() == max([checkpoint, *earlier]) + 1
