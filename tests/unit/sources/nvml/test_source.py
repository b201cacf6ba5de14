"""The source around the thread: prompt for any driver behaviour, bounded, and ended when closed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.waiting import eventually

from wattspan.model import Trouble
from wattspan.model.settings import Duration, SettingError, convert
from wattspan.ports import CounterSource, SourceContext
from wattspan.sources.driver_thread import DriverThreadSource as Source
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.sources.nvml.source import LIBRARY, open_nvml, plugin
from wattspan.testing import FakeDirectory, ManualClock


class Hanging:
    """Makes one function block until released."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def __call__(self, name: str) -> None:
        if name == self.name:
            self.entered.set()
            self.let_go.wait(30)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nvml(clock: ManualClock) -> FakeNvml:
    return FakeNvml(clock, FakeGpu("GPU-a"))


def opened(nvml: Any, clock: ManualClock, **settings: Any) -> Source:
    fast = {"interval": Duration.parse("10ms"), **settings}
    source = open_nvml(NvmlSettings(**fast), SourceContext(clock, FakeDirectory(), nvml=nvml))
    assert isinstance(source, Source)
    return source


def nvml_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "wattspan-nvml"}


@pytest.fixture
def source(nvml: FakeNvml, clock: ManualClock) -> Iterator[Source]:
    source = opened(nvml, clock)
    yield source
    source.close()


def test_source_is_a_counter_source(source: Source) -> None:
    assert isinstance(source, CounterSource)
    assert source.name == "nvml"


def test_results_of_the_thread_are_returned_once(source: Source, clock: ManualClock) -> None:
    batch = eventually(lambda: b if (b := source.read()).readings else None, "a first reading")
    assert batch.domains[0].id == "gpu:GPU-a"
    seen = {reading.at for reading in batch.readings}
    clock.advance(0.1)
    later = eventually(
        lambda: [r for r in source.read().readings if r.at not in seen], "a second reading"
    )
    assert later[0].counter > batch.readings[0].counter


def test_domains_and_statuses_are_in_every_batch(source: Source) -> None:
    eventually(lambda: source.read().gpus, "a status")
    first, second = source.read(), source.read()
    assert first.domains is second.domains
    assert first.gpus == second.gpus != ()


def test_hanging_call_never_blocks_the_reader_and_is_named(
    nvml: FakeNvml, clock: ManualClock
) -> None:
    hanging = Hanging("nvmlDeviceGetTotalEnergyConsumption")
    nvml.before = hanging
    source = opened(nvml, clock)
    assert hanging.entered.wait(20)
    assert source.read().failures == ()
    clock.advance(2.5)
    (failure,) = source.read().failures
    assert failure.trouble is Trouble.STUCK
    assert "nvmlDeviceGetTotalEnergyConsumption" in failure.cause
    hanging.let_go.set()
    eventually(lambda: not source.read().failures, "the call has returned")
    clock.advance(1)
    eventually(lambda: source.read().readings, "a reading once the call returned")
    source.close()


def test_hanging_initialisation_is_stuck_too(nvml: FakeNvml, clock: ManualClock) -> None:
    hanging = Hanging("nvmlInit")
    nvml.before = hanging
    source = opened(nvml, clock)
    assert hanging.entered.wait(20)
    clock.advance(3)
    (failure,) = source.read().failures
    assert "nvmlInit" in failure.cause
    hanging.let_go.set()
    source.close()


def test_stuck_thread_does_not_delay_close(nvml: FakeNvml, clock: ManualClock) -> None:
    hanging = Hanging("nvmlDeviceGetUtilizationRates")
    nvml.before = hanging
    others = nvml_threads()
    source = opened(nvml, clock)
    assert hanging.entered.wait(20)
    clock.advance(60)
    source.close()  # returns although the call does not
    (thread,) = nvml_threads() - others
    assert thread.daemon
    hanging.let_go.set()
    thread.join(20)
    assert nvml.initialised == 0  # released at the first opportunity


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_is_reported(nvml: FakeNvml, clock: ManualClock) -> None:
    def die(_name: str) -> None:
        raise SystemExit

    nvml.before = die
    source = opened(nvml, clock)
    (failure,) = eventually(lambda: source.read().failures, "a failure")
    assert failure.trouble is Trouble.MALFORMED
    source.close()


def test_statuses_that_are_not_renewed_are_withdrawn(nvml: FakeNvml, clock: ManualClock) -> None:
    source = opened(nvml, clock)
    eventually(lambda: source.read().gpus, "a status")
    nvml.errors["GPU-a"] = 15
    clock.advance(10)
    assert source.read().gpus == ()
    source.close()


def test_closing_ends_the_thread_and_the_library(nvml: FakeNvml, clock: ManualClock) -> None:
    others = nvml_threads()  # a stuck one of another test may still be there
    source = opened(nvml, clock)
    eventually(lambda: source.read().readings, "a reading")
    assert nvml_threads() - others
    source.close()
    assert not nvml_threads() - others
    assert nvml.initialised == 0
    source.close()


def test_driver_not_loaded_opens_and_reports(nvml: FakeNvml, clock: ManualClock) -> None:
    nvml.errors["nvmlInit"] = 9
    source = opened(nvml, clock)
    (failure,) = eventually(lambda: source.read().failures, "a failure")
    assert failure.trouble is Trouble.ABSENT
    nvml.errors.clear()

    def reading() -> object:
        clock.advance(1)
        return source.read().readings

    eventually(reading, "a reading from the driver loaded meanwhile")
    source.close()


def test_disabled_source_is_not_opened(nvml: FakeNvml, clock: ManualClock) -> None:
    context = SourceContext(clock, FakeDirectory(), nvml=nvml)
    assert open_nvml(NvmlSettings(enabled=False), context) is None
    assert nvml.calls == []


MISSING_LIBRARY = """
import ctypes
from wattspan.ports import SourceContext, SourceError
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.sources.nvml.source import LIBRARY, open_nvml
from wattspan.testing import FakeDirectory, ManualClock
try:
    ctypes.CDLL(LIBRARY)
except OSError:
    context = SourceContext(ManualClock(), FakeDirectory())
    print(open_nvml(NvmlSettings(), context))
    try:
        open_nvml(NvmlSettings(enabled=True), context)
    except SourceError as error:
        print(error)
"""


def test_missing_library_is_an_error_only_if_required() -> None:
    # Other tests load an emulated library of this name, which then stays in their process.
    command = [sys.executable, "-c", MISSING_LIBRARY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip(f"this machine has {LIBRARY}")
    absent, error = done.stdout.splitlines()
    assert absent == "None"
    assert "libnvidia-ml" in error


def test_emulated_host_without_gpus_never_shows_real_ones(clock: ManualClock) -> None:
    assert open_nvml(NvmlSettings(), SourceContext(clock, FakeDirectory(), emulated=True)) is None


def test_settings_are_read_from_their_table() -> None:
    settings = convert({"enabled": True, "interval": "50ms"}, plugin.settings, "sources.nvml")
    assert isinstance(settings, NvmlSettings)
    assert settings.interval == 50_000_000


@pytest.mark.parametrize(
    ("key", "value"),
    [("interval", "0ms"), ("process_interval", "100ms"), ("deadline", "50ms")],
)
def test_invalid_setting_is_rejected(key: str, value: str) -> None:
    with pytest.raises(SettingError, match=key):
        convert({key: value}, NvmlSettings, "sources.nvml")


LOADED_FROM_A_PLACE = """
import ctypes, sys
from wattspan.sources.nvml.source import LIBRARY, load_binding

def is_found():
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True

print(is_found(), load_binding(sys.argv[1:]).__name__, is_found())
"""


@pytest.mark.needs_cc
def test_library_in_a_place_that_the_loader_does_not_search_has_its_name(tmp_path: Path) -> None:
    """The binding asks for the library by its name."""
    flags = ("-shared", f"-Wl,-soname,{LIBRARY}", "-o", str(tmp_path / LIBRARY), "-xc", "-")
    subprocess.run(["cc", *flags], input=b"", check=True)
    places = str(tmp_path / "absent"), str(tmp_path)
    command = [sys.executable, "-c", LOADED_FROM_A_PLACE, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if done.stdout.startswith("True"):
        pytest.skip(f"this machine has {LIBRARY}")
    assert done.stdout == "False pynvml True\n"
