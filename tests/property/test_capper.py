"""For any order of events, every device ends with its owner's limit."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testbed.capper_bench import Bench, Killed, W

from wattspan.capper.planner import ImposedLimits, OperatorLimits
from wattspan.model import CapKey, Trouble
from wattspan.ports import CapsError

ORIGINAL, DEFAULT, FLOOR, LOWEST = 650 * W, 700 * W, 420 * W, 300 * W
BOARDS = st.integers(0, 1)
WISHES = st.integers(10, 40).map(lambda n: n * 20 * W)
THEIRS = st.sampled_from([333_333, 444_444, 613_131, ORIGINAL, DEFAULT])
HOLDERS = st.integers(1, 2)
FAULTS = st.sampled_from([None, Trouble.RETRY, Trouble.DENIED, Trouble.ABSENT])


class Host(RuleBasedStateMachine):
    """A capper on two boards, its tuners, its operator, and everybody else."""

    @initialize(step=st.sampled_from([0.1, 0.25, 1.0]))
    def begin(self, step: float) -> None:
        self.folder = Path(tempfile.mkdtemp())
        rules = OperatorLimits(FLOOR / DEFAULT, LOWEST // W, step)
        self.bench = Bench(self.folder, limits=rules)
        self.theirs = dict.fromkeys(self.bench.actuator.boards, ORIGINAL)
        """Value of the last foreign writer."""
        self.ours: dict[str, set[int]] = {name: set() for name in self.theirs}
        self.imposed = ImposedLimits()
        self.kill_at: int | None = None
        self.kill_late = False
        self.bench.actuator.watch = self.before_write
        self.bench.actuator.after = self.after_write

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.end()
            shutil.rmtree(self.folder)

    # ----------------------------------------------------------- invariants at every write

    def before_write(self, key: CapKey, value: int | None) -> None:
        name = key.device
        board = self.bench.actuator.boards[name]
        assert value is not None
        entry = self.bench.on_disk.get(name)
        assert entry is not None, "nothing is written without a journal on disk"
        assert entry["original"] == self.theirs[name], "the journal knows whose it was"
        assert value in (entry["value"], entry["original"])
        assert board.stands in {self.theirs[name], *self.ours[name]}, "ours, or nobody's"
        assert value <= self.theirs[name], "never above the original"
        assert value >= min(LOWEST, self.theirs[name]), "never below the operator's floor"
        if not self.imposed.fixed and not self.imposed.shares:
            assert value >= min(FLOOR, self.theirs[name]), "never below the tuner's floor"
        if value != self.theirs[name]:
            self.ours[name].add(value)
        if self.kill_at is not None and not self.kill_late:
            self.count_down()

    def after_write(self, key: CapKey) -> None:
        if self.kill_at is not None and self.kill_late:
            self.count_down()

    def count_down(self) -> None:
        assert self.kill_at is not None
        self.kill_at -= 1
        if self.kill_at < 0:
            self.kill_at = None
            raise Killed

    # ------------------------------------------------------------------------- events

    @rule(holder=HOLDERS, number=BOARDS, value=WISHES)
    def hold(self, holder: int, number: int, value: int) -> None:
        self.attempt(lambda: self.bench.hold(value, number, holder=holder, job=f"job{holder}"))

    @rule(holder=HOLDERS, value=WISHES)
    def hold_both(self, holder: int, value: int) -> None:
        self.attempt(lambda: self.bench.hold(value, 0, 1, holder=holder, job=f"job{holder}"))

    @rule(holder=HOLDERS)
    def renew(self, holder: int) -> None:
        self.bench.manager.renew(holder)

    @rule(holder=HOLDERS)
    def release(self, holder: int) -> None:
        self.attempt(lambda: self.bench.manager.release(holder))

    @rule(seconds=st.sampled_from([0, 1, 4, 11, 70, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.bench.clock.advance(seconds)
        self.attempt(self.bench.manager.turn)

    @rule(number=BOARDS, value=THEIRS)
    def somebody_writes(self, number: int, value: int) -> None:
        name = f"gpu{number}"
        self.bench.board(number).stands = self.theirs[name] = value
        self.ours[name].clear()

    @rule(number=BOARDS, value=THEIRS)
    def somebody_writes_while_we_journal(self, number: int, value: int) -> None:
        self.bench.journal.meanwhile = lambda: self.somebody_writes(number, value)

    @rule(number=BOARDS)
    def device_is_reset(self, number: int) -> None:
        """No program has a limit on it afterwards: a capped board is capped again."""
        self.somebody_writes(number, DEFAULT)
        self.bench.board(number).session += 1

    @rule(number=BOARDS, fault=FAULTS)
    def device_fails(self, number: int, fault: Trouble | None) -> None:
        self.bench.board(number).fault = fault

    @rule(number=BOARDS, late=st.booleans(), inert=st.booleans(), locked=st.booleans())
    def device_misbehaves(self, number: int, late: bool, inert: bool, locked: bool) -> None:
        board = self.bench.board(number)
        board.late, board.inert, board.locked = late, inert, locked

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.bench.journal.full = full

    @rule()
    def kill_between_the_copies_of_the_journal(self) -> None:
        self.bench.journal.cut = True

    @rule(fixed=st.none() | WISHES, share=st.none() | WISHES)
    def operator(self, fixed: int | None, share: int | None) -> None:
        keys = [self.bench.key(n) for n in (0, 1)]
        self.imposed = ImposedLimits(
            {} if fixed is None else dict.fromkeys(keys, fixed),
            {} if share is None else dict.fromkeys(keys, share),
            None if share is None else 2 * share,
        )
        self.bench.manager.impose(self.imposed)

    @rule()
    def crash(self) -> None:
        self.restart()

    @rule(late=st.booleans(), writes=st.integers(0, 2))
    @precondition(lambda self: self.kill_at is None)
    def kill_at_a_write(self, late: bool, writes: int) -> None:
        """Sooner or later it is killed at a write: before it has happened, or just after."""
        self.kill_at, self.kill_late = writes, late

    @rule()
    def accept(self) -> None:
        self.attempt(self.bench.manager.accept)

    @rule()
    def restore_and_start_again(self) -> None:
        self.attempt(self.bench.manager.restore)
        self.restart()

    @invariant()
    def what_is_ours_is_on_disk(self) -> None:
        if not hasattr(self, "bench"):
            return
        for name, board in self.bench.actuator.boards.items():
            if board.stands != self.theirs[name]:
                entry = self.bench.on_disk.get(name)
                assert entry is not None
                assert board.stands in (entry["value"], entry["before"])
                assert entry["original"] == self.theirs[name]

    # ----------------------------------------------------------------------------------- helpers

    def attempt(self, act: object) -> None:
        assert callable(act)
        try:
            act()
        except CapsError:
            pass
        except Killed:
            self.restart()

    def restart(self) -> None:
        """Another capper on the same disk; it may be killed as well, but not for ever."""
        while True:
            try:
                self.bench.start()
                self.bench.manager.impose(self.imposed)
                self.bench.manager.turn()
            except Killed:
                continue
            return

    def end(self) -> None:
        """All devices recover, and the capper receives a stop."""
        self.kill_at = None
        for board in self.bench.actuator.boards.values():
            board.fault, board.late, board.inert, board.locked = None, False, False, False
        self.bench.journal.full = self.bench.journal.cut = False
        assert self.bench.manager.restore() == ()
        assert dict(zip(self.theirs, self.bench.stands, strict=True)) == self.theirs
        left = self.bench.on_disk.values()
        assert all(entry["foreign"] is not None for entry in left)


TestHost = Host.TestCase
TestHost.settings = settings(stateful_step_count=40)


CONDITIONS: dict[str, dict[str, object]] = {
    "healthy": {},
    "unset": {"stands": None, "obeys": None},
    "locked": {"locked": True},
    "inert": {"inert": True},
    "gone": {"fault": Trouble.ABSENT},
    "denied": {"fault": Trouble.DENIED},
}


@given(st.lists(st.sampled_from(sorted(CONDITIONS)), min_size=1, max_size=4), st.integers(1, 5))
def test_bad_knobs_leave_the_outcome_of_the_others(conditions: list[str], turns: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        bench = Bench(Path(folder), boards=len(conditions))
        bench.manager.impose(
            ImposedLimits(fixed={bench.key(n): 500 * W for n in range(len(conditions))})
        )
        for number, condition in enumerate(conditions):
            for name, value in CONDITIONS[condition].items():
                setattr(bench.board(number), name, value)
        for _ in range(turns):
            bench.turn(60)
        healthy = [n for n, one in enumerate(conditions) if one == "healthy"]
        assert [bench.board(n).stands for n in healthy] == [500 * W] * len(healthy)
        assert {key for key, _ in bench.actuator.written} >= {f"gpu{n}" for n in healthy}
        assert bench.manager.devices.failing == {
            bench.key(n) for n in range(len(conditions)) if n not in healthy
        }
