"""A power budget that is in force is exceeded at no write, however often the capper is killed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testbed.capper_bench import Bench, Killed, W

from wattspan.capper.planner import OperatorLimits, imposed_limits
from wattspan.config import CapsSettings
from wattspan.model import CapKey, Trouble
from wattspan.ports import CapsError

pytestmark = pytest.mark.slow

BOARDS = 3
ORIGINALS = 650 * W
NUMBERS = st.integers(0, BOARDS - 1)
BUDGETS = st.integers(35, 95).map(lambda n: n * 20 * W)
"""700 W to 1,900 W; the boards need 600 W at least, and take 1,950 W without a budget."""
WISHES = st.integers(10, 34).map(lambda n: n * 20 * W)


class BudgetedHost(RuleBasedStateMachine):
    """Three boards under a budget; tuners hold and release, and processes are killed at writes."""

    @initialize(budget=BUDGETS, step=st.sampled_from([0.25, 1.0]))
    def begin(self, budget: int, step: float) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.bench = Bench(self.folder, boards=BOARDS, limits=OperatorLimits(0.0, 0, step))
        self.bench.actuator.watch = lambda key, value: self.count_down(late=False)
        self.bench.actuator.after = self.after_write
        self.kill_at: int | None = None
        self.kill_late = False
        self.set_budget(budget)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            shutil.rmtree(self.folder)

    @rule(budget=BUDGETS)
    def set_budget(self, budget: int) -> None:
        """The configuration changes: the budget is in force once a few turns have passed."""
        self.budget, self.in_force = budget, False
        self.settle()

    @rule(number=NUMBERS, value=WISHES)
    def hold(self, number: int, value: int) -> None:
        self.attempt(lambda: self.bench.hold(value, number, holder=number, job=f"job{number}"))

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        self.attempt(lambda: self.bench.manager.release(number))

    @rule()
    def turn(self) -> None:
        self.attempt(self.impose_and_turn)

    @rule(number=NUMBERS, fault=st.sampled_from([None, Trouble.STUCK, Trouble.RETRY]))
    def device_hangs(self, number: int, fault: Trouble | None) -> None:
        self.bench.board(number).fault = fault

    @rule(late=st.booleans(), writes=st.integers(0, 3))
    @precondition(lambda self: self.kill_at is None)
    def kill_at_a_write(self, late: bool, writes: int) -> None:
        self.kill_at, self.kill_late = writes, late

    @rule()
    def kill(self) -> None:
        self.recover(restored_between=True)

    @rule()
    def kill_and_start_at_once(self) -> None:
        self.recover(restored_between=False)

    @rule()
    def stop_and_start(self) -> None:
        self.attempt(self.bench.manager.stop)
        self.recover(restored_between=True)

    @invariant()
    def budget_holds(self) -> None:
        if hasattr(self, "bench"):
            self.check()

    # ----------------------------------------------------------------------------------- helpers

    def check(self) -> None:
        total = sum(self.bench.stands)
        self.in_force = self.in_force or total <= self.budget
        assert not self.in_force or total <= self.budget

    def after_write(self, key: CapKey) -> None:
        self.check()
        self.count_down(late=True)

    def count_down(self, *, late: bool) -> None:
        if self.kill_at is None or self.kill_late is not late:
            return
        self.kill_at -= 1
        if self.kill_at < 0:
            self.kill_at = None
            raise Killed

    def impose_and_turn(self) -> None:
        keeper = self.bench.manager
        keeper.find_devices()
        keeper.impose(imposed_limits(CapsSettings(), keeper.planner(), self.budget))
        keeper.turn()

    def settle(self) -> None:
        for _ in range(3):
            self.bench.clock.advance(1)
            self.attempt(self.impose_and_turn)

    def attempt(self, act: object) -> None:
        assert callable(act)
        try:
            act()
        except CapsError:
            pass
        except Killed:
            self.recover(restored_between=True)

    def recover(self, *, restored_between: bool) -> None:
        """After a kill the service manager runs `caps restore --tuned`, then the next capper."""
        steps = [self.restore_tuned] if restored_between else []
        for step in [*steps, self.start]:
            while True:
                try:
                    step()
                except Killed:
                    continue
                break

    def restore_tuned(self) -> None:
        self.bench.start()
        self.bench.manager.impose_retained()
        self.bench.manager.stop()

    def start(self) -> None:
        self.bench.start()
        self.impose_and_turn()


TestBudgetedHost = BudgetedHost.TestCase
TestBudgetedHost.settings = settings(
    max_examples=settings().max_examples * 3 // 5, stateful_step_count=40, deadline=None
)


def test_hidden_device_keeps_the_limits_of_the_others_over_two_kills() -> None:
    host = BudgetedHost()
    host.begin(budget=1500 * W, step=1.0)
    host.hold(number=0, value=200 * W)
    host.turn()
    host.device_hangs(number=1, fault=Trouble.STUCK)
    for _ in range(2):
        host.kill()
        host.budget_holds()
    host.teardown()
