"""One board whose calls hang in the driver: the others are read on, and no energy is lost."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise

import pynvml
import pytest
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.gpu_sessions import nvml_session
from testbed.waiting import eventually

from wattspan.model import MILLISECOND, SECOND, Failure, Reading, Trouble
from wattspan.model.settings import Duration
from wattspan.ports import CounterSource, SourceContext
from wattspan.sources.driver_thread import CallGivenUpError
from wattspan.sources.gpu.session import GpuSession
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.sources.nvml.source import open_nvml
from wattspan.testing import FakeDirectory, ManualClock

COUNTER = "nvmlDeviceGetTotalEnergyConsumption"
WATTS = {"GPU-a": 100.0, "GPU-b": 200.0, "GPU-c": 400.0}
DEADLINE = 60


def settings(deadline: int = DEADLINE) -> NvmlSettings:
    """``deadline`` is in seconds."""
    return NvmlSettings(interval=Duration.parse("10ms"), deadline=Duration.parse(f"{deadline}s"))


SETTINGS = settings()


class Driver:
    """Three boards; reads of ``call`` of those in ``hanging`` block until they are released."""

    def __init__(self, call: str = COUNTER, step: int = 1) -> None:
        self.clock = ManualClock()
        boards = (FakeGpu(one, watts=watts, step_ns=step) for one, watts in WATTS.items())
        self.nvml = FakeNvml(self.clock, *boards)
        self.nvml.before_call[call] = self._wait
        self.context = SourceContext(self.clock, FakeDirectory(), nvml=self.nvml)
        self.hanging: dict[str, threading.Event] = {}
        self.entered: list[str] = []

    def _wait(self, gpu: FakeGpu) -> None:
        if (released := self.hanging.get(gpu.uuid)) is not None:
            self.entered.append(gpu.uuid)
            released.wait(60)

    def hang(self, *boards: str) -> None:
        self.hanging.update((one, threading.Event()) for one in boards)

    def release(self) -> None:
        while self.hanging:
            self.hanging.popitem()[1].set()


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.release()


class Reader:
    """The results of a source; 50 ms pass before each look at them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.threads = _threads()
        source = open_nvml(SETTINGS, driver.context)
        assert isinstance(source, CounterSource)
        self.source = source
        self.readings: defaultdict[str, list[Reading]] = defaultdict(list)
        self.stuck: list[Failure] = []

    def look(self, seconds: float = 0.05) -> None:
        self.driver.clock.advance(seconds)
        batch = self.source.read()
        for reading in batch.readings:
            self.readings[reading.domain_id.removeprefix("gpu:")].append(reading)
        assert {one.trouble for one in batch.failures} <= {Trouble.STUCK}
        self.stuck = [*batch.failures]

    def until(self, reached: Callable[[], bool], what: str, seconds: float = 0.05) -> None:
        def look() -> bool:
            self.look(seconds)
            return reached()

        eventually(look, what)

    def until_read(self, *boards: str) -> None:
        """Until each of ``boards`` has two further readings."""
        before = {one: len(self.readings[one]) for one in boards}
        self.until(
            lambda: all(len(self.readings[one]) > count + 1 for one, count in before.items()),
            f"{', '.join(boards)} are read",
        )

    def hang(self, *boards: str) -> None:
        """Let the calls of some boards hang, one after the other, for longer than the deadline."""
        self.driver.hang(*boards)
        for count in range(1, len(boards) + 1):
            self.until(lambda n=count: len(self.driver.entered) == n, "a call hangs")  # type: ignore[misc]
            self.look(DEADLINE + 1)
            assert len(self.stuck) == count

    def check_energy(self) -> None:
        """Each counter goes on in its epoch, up to the present energy of the board."""
        self.look()
        self.until(
            lambda: all(
                self.readings[gpu.uuid][-1].counter == 1000 * self.driver.nvml.energy(gpu)
                for gpu in self.driver.nvml.gpus
            ),
            "the energy is read",
            0.0,
        )
        for found in self.readings.values():
            assert {one.epoch for one in found} == {0}
            assert found == sorted(found, key=lambda one: (one.at.mono, one.counter))

    def started(self) -> set[threading.Thread]:
        return _threads() - self.threads


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "wattspan-nvml"}


def test_hung_board_stops_no_other_and_loses_no_energy(driver: Driver) -> None:
    reader = Reader(driver)
    reader.until_read(*WATTS)
    reader.hang("GPU-b")
    missing = len(reader.readings["GPU-b"])
    reader.until_read("GPU-a", "GPU-c")
    (failure,) = reader.stuck
    assert "H100 80GB HBM3 1" in failure.thing
    assert COUNTER in failure.cause
    assert failure.domain_id is None  # its counter is late, not frozen: its energy is waited for
    assert driver.entered == ["GPU-b"]
    assert len(reader.readings["GPU-b"]) == missing
    driver.release()
    reader.until(lambda: not reader.stuck, "the call has returned")
    reader.until_read(*WATTS)
    reader.check_energy()
    reader.source.close()
    assert not reader.started()


def test_threads_are_at_most_one_for_each_hung_board_and_one_more(driver: Driver) -> None:
    reader = Reader(driver)
    reader.until_read(*WATTS)
    reader.hang(*WATTS)
    for _ in range(100):
        reader.look()
    assert sorted(driver.entered) == sorted(WATTS)
    assert len(reader.started()) == 4
    driver.release()
    reader.until(lambda: not reader.stuck, "the calls have returned")
    reader.until_read(*WATTS)
    reader.check_energy()
    eventually(lambda: len(reader.started()) == 1, "the threads of the calls end")
    reader.source.close()
    assert not reader.started()


def test_library_is_released_when_the_last_call_has_returned_after_the_end(driver: Driver) -> None:
    reader = Reader(driver)
    reader.hang("GPU-a", "GPU-c")
    reader.source.close()
    assert driver.nvml.initialised == 1
    driver.release()
    eventually(lambda: not reader.started(), "the threads end")
    assert driver.nvml.initialised == 0


class HungSession:
    """A session that a thread has sampled until a call of the second board hung."""

    def __init__(self, driver: Driver, seconds: float = 0.1, deadline: int = DEADLINE) -> None:
        """It hangs after some ``seconds`` for longer than ``deadline``."""
        self.driver = driver
        self.session = nvml_session(driver.nvml, settings(deadline), driver.context)
        self.began = driver.clock.monotonic()
        self.session.sample()
        driver.clock.advance(seconds)
        driver.hang("GPU-b")
        self.at = driver.clock.monotonic()
        self.returned: list[str] = []
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        eventually(lambda: driver.entered, "the call hangs")
        assert not self.session.give_up()  # it may still return in time
        driver.clock.advance(deadline + 1)
        assert self.session.give_up()
        assert not self.session.give_up()

    def _sample(self) -> None:
        try:
            self.session.sample()
        except CallGivenUpError as error:
            self.session.take_back(error.device)
            self.returned.append(error.device)

    def release(self) -> None:
        self.driver.release()
        self.thread.join(60)
        assert self.returned == ["gpu:GPU-b"]

    def read(self, seconds: int) -> set[str]:
        """The boards with a reading at the end of some seconds."""
        for _ in range(seconds):
            self.driver.clock.advance(1)
            batch = self.session.sample()
        return {one.domain_id.removeprefix("gpu:") for one in batch.readings}


def test_findings_of_a_sample_that_hangs_are_in_the_next_one(driver: Driver) -> None:
    hung = HungSession(driver)
    batch = hung.session.sample()
    times = {(one.domain_id, one.at.mono > hung.at + SECOND) for one in batch.readings}
    assert times == {("gpu:GPU-a", False), ("gpu:GPU-a", True), ("gpu:GPU-c", True)}
    hung.release()
    assert hung.read(1) == {*WATTS}
    hung.session.close()
    assert driver.nvml.initialised == 0


def test_usage_until_a_hang_is_settled_after_it() -> None:
    driver = Driver("nvmlDeviceGetTemperature")
    driver.nvml.errors["nvmlDeviceGetProcessUtilization"] = 3  # processes are not told apart
    hung = HungSession(driver, seconds=1.0, deadline=10)
    batches = [hung.session.sample()]
    hung.release()
    for _ in range(3):
        driver.clock.advance(1)
        batches.append(hung.session.sample())
    used = [one for batch in batches for one in batch.usages if one.resource == "gpu:GPU-b"]
    assert used[0].start.mono == hung.began
    assert all(one.end == other.start for one, other in pairwise(used))
    hung.session.close()


EVERY = 50 * MILLISECOND


def reads_between(driver: Driver, session: GpuSession) -> Iterator[int]:
    """The times at which reads between the samples of a session are due; makes the samples."""
    session.sample(EVERY)
    clock = driver.clock
    last = clock.monotonic()
    for _ in range(10_000):
        between = session.next_read(clock.monotonic())
        due = last + EVERY if between is None else min(last + EVERY, between)
        clock.advance(ns=max(MILLISECOND, due - clock.monotonic()))
        if clock.monotonic() >= last + EVERY:
            last += EVERY
            session.sample(EVERY)
        else:
            yield clock.monotonic()


def test_findings_of_a_read_that_hangs_are_in_the_next_sample() -> None:
    driver = Driver(step=100 * MILLISECOND)
    session = nvml_session(driver.nvml, SETTINGS, driver.context)
    turns = map(session.read_between, reads_between(driver, session))
    count, expected = next((n, found) for n, found in enumerate(turns) if found)
    session.close()
    assert {one.domain_id for one in expected} == {f"gpu:{one}" for one in WATTS}

    driver = Driver(step=100 * MILLISECOND)  # the same again, and the second board hangs
    session = nvml_session(driver.nvml, SETTINGS, driver.context)
    for number, now in enumerate(reads_between(driver, session)):
        if number == count:
            break
        assert not session.read_between(now)
    driver.hang("GPU-b")
    returned: list[str] = []

    def read() -> None:
        try:
            session.read_between(now)
        except CallGivenUpError as error:
            session.take_back(error.device)
            returned.append(error.device)

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: driver.entered, "the call hangs")
    driver.clock.advance(DEADLINE + 1)
    assert session.give_up()
    assert expected[0] in session.sample(EVERY).readings
    driver.release()
    thread.join(60)
    assert returned == ["gpu:GPU-b"]
    session.close()


def test_library_is_not_initialised_again_during_a_hang(driver: Driver) -> None:
    hung = HungSession(driver)
    driver.nvml.errors["GPU-c"] = 15
    assert hung.read(400) == {"GPU-a"}
    assert driver.nvml.generation == 1
    hung.release()
    assert hung.read(400) == {"GPU-a", "GPU-b"}
    assert driver.nvml.generation > 1
    driver.nvml.errors.clear()
    assert hung.read(20) == {*WATTS}
    hung.session.close()


def test_session_that_fails_during_a_hang_begins_anew_after_it(driver: Driver) -> None:
    hung = HungSession(driver)
    driver.nvml.errors["GPU-a"] = 1  # uninitialised
    assert hung.read(2) == set()
    driver.nvml.errors.clear()
    hung.release()
    assert hung.read(20) == {*WATTS}
    hung.session.close()
    assert driver.nvml.initialised == 0


def test_board_that_hangs_is_not_released_when_the_session_fails(driver: Driver) -> None:
    """The call that hangs may still write into what a release would free."""
    hung = HungSession(driver)
    board = hung.session._gpus["gpu:GPU-b"]
    driver.nvml.errors["GPU-a"] = 1  # uninitialised
    hung.read(2)
    assert hung.session._gpus == {"gpu:GPU-b": board}
    hung.release()
    hung.session.close()


def test_search_for_a_lost_board_that_hangs_is_given_up(driver: Driver) -> None:
    session = nvml_session(driver.nvml, SETTINGS, driver.context)
    session.sample()
    driver.nvml.errors["GPU-b"] = 15  # it is lost
    driver.clock.advance(1)
    session.sample()
    driver.nvml.errors.clear()
    entered, released = threading.Event(), threading.Event()

    def search(nvml: FakeNvml, *_: object) -> object:
        entered.set()
        assert released.wait(60)
        raise pynvml.NVMLError(15)

    driver.nvml.answers["nvmlDeviceGetUUID"] = search
    returned: list[str] = []

    def sample() -> None:
        try:
            session.sample()
        except CallGivenUpError as error:
            session.take_back(error.device)
            returned.append(error.device)

    driver.clock.advance(10)
    thread = threading.Thread(target=sample)
    thread.start()
    assert entered.wait(60)
    driver.clock.advance(DEADLINE + 1)
    assert session.give_up()
    assert {one.domain_id for one in session.sample().readings} == {"gpu:GPU-a", "gpu:GPU-c"}
    released.set()
    thread.join(60)
    assert returned == ["gpu:GPU-b"]
    session.close()
