"""Activity of MIG instances from dcgm-exporter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.dcgm_exporter import DcgmServer, series

from wattspan.sources.nvml.dcgm import (
    FETCH_INTERVAL,
    LONGEST_RETRY,
    MAX_AGE,
    DcgmExporter,
    parse_activity,
)
from wattspan.sources.nvml.device import NvmlSettings
from wattspan.testing import ManualClock


def test_activity_of_multiprocessors_is_preferred() -> None:
    text = "\n".join(
        (
            "# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles",
            series("GR_ENGINE_ACTIVE", "GPU-a", "1", "1.000000"),
            series("GR_ENGINE_ACTIVE", "GPU-a", "2", "0.5"),
            series("SM_ACTIVE", "GPU-a", "1", "0.25"),
            series("SM_ACTIVE", "GPU-b", "1", "0"),
        )
    )
    assert parse_activity(text) == {("GPU-a", 1): 250_000, ("GPU-a", 2): 500_000, ("GPU-b", 1): 0}


@pytest.mark.parametrize("value", ["NaN", "-1", "1.5", "9223372036854775794", "x", "inf"])
def test_impossible_activity_is_ignored(value: str) -> None:
    """DCGM's blank values reach its exporter."""
    assert parse_activity(series("SM_ACTIVE", "GPU-a", "1", value)) == {}


def test_activity_of_a_whole_board_is_ignored() -> None:
    assert parse_activity(series("SM_ACTIVE", "GPU-a", "", "0.5")) == {}
    assert parse_activity('DCGM_FI_PROF_SM_ACTIVE{gpu="0"} 0.5') == {}


@given(st.text() | st.text().map(lambda text: series("SM_ACTIVE", text, text, text)))
def test_no_text_breaks_the_parser(text: str) -> None:
    assert all(0 <= value <= 1_000_000 for value in parse_activity(text).values())


@pytest.fixture
def exporter() -> Iterator[DcgmServer]:
    exporter = DcgmServer()
    yield exporter
    exporter.close()


def test_newest_activity_of_a_board_is_kept_for_a_while(exporter: DcgmServer) -> None:
    clock = ManualClock()
    exporter.body = series("SM_ACTIVE", "GPU-a", "3", "0.75").encode()
    dcgm = DcgmExporter(exporter.url, clock)
    dcgm.fetch()
    assert dcgm.trouble == ""
    exporter.status = 500
    dcgm.fetch()
    assert "500" in dcgm.trouble
    assert dcgm.activity("GPU-a") == {3: 750_000}
    assert dcgm.activity("GPU-b") is None
    clock.advance(ns=MAX_AGE + 1)
    assert dcgm.activity("GPU-a") is None
    dcgm.close()


def test_exporter_without_the_metric_is_reported(exporter: DcgmServer) -> None:
    exporter.body = b'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 60\n'
    dcgm = DcgmExporter(exporter.url, ManualClock())
    dcgm.fetch()
    assert dcgm.trouble == "it has no DCGM_FI_PROF_SM_ACTIVE of a MIG instance"


def test_failing_exporter_is_asked_less_and_less(exporter: DcgmServer) -> None:
    clock = ManualClock()
    dcgm = DcgmExporter(exporter.url, clock)
    exporter.status = 500
    delays = [dcgm.fetch() - clock.monotonic() for _ in range(4)]
    assert delays == [FETCH_INTERVAL * 2**n for n in range(4)]
    assert max(dcgm.fetch() - clock.monotonic() for _ in range(6)) == LONGEST_RETRY
    exporter.status, exporter.body = 200, series("SM_ACTIVE", "GPU-a", "3", "0.75").encode()
    assert dcgm.fetch() - clock.monotonic() == FETCH_INTERVAL
    exporter.body = b""
    assert dcgm.fetch() - clock.monotonic() == FETCH_INTERVAL
    assert dcgm.fetch() - clock.monotonic() == 2 * FETCH_INTERVAL


def test_redirect_is_not_followed(exporter: DcgmServer) -> None:
    exporter.status, exporter.headers = 302, {"Location": "http://127.0.0.1:1/"}
    dcgm = DcgmExporter(exporter.url, ManualClock())
    dcgm.fetch()
    assert "302" in dcgm.trouble


def test_unreachable_exporter_is_reported() -> None:
    dcgm = DcgmExporter("http://127.0.0.1:1/metrics", ManualClock())
    dcgm.fetch()
    assert dcgm.trouble == "connection refused"


@pytest.mark.parametrize("address", ["127.0.0.1:9400", "file:///etc/passwd"])
def test_address_that_is_no_url_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"dcgm: .* is no address"):
        NvmlSettings(dcgm=address)


@pytest.mark.parametrize("digits", ["9" * 5000, "1234", "²", "٣"])
def test_implausible_instance_id_is_ignored(digits: str) -> None:
    valid = series("SM_ACTIVE", "GPU-a", "1", "0.5")
    hostile = series("SM_ACTIVE", "GPU-a", digits, "0.5")
    assert parse_activity(f"{hostile}\n{valid}") == {("GPU-a", 1): 500_000}


def test_value_of_many_digits_is_ignored() -> None:
    assert parse_activity(series("SM_ACTIVE", "GPU-a", "1", f"0.{'1' * 5000}")) == {}


@pytest.mark.parametrize("label", ["a", 'a="', 'a="\\', 'a="b",', "{", "="])
def test_hostile_labels_are_ignored(label: str) -> None:
    """A pattern that is searched for in such a line takes quadratic time: minutes."""
    valid = series("SM_ACTIVE", "GPU-a", "1", "0.5")
    hostile = "DCGM_FI_PROF_SM_ACTIVE{" + label * (400_000 // len(label))
    short = "DCGM_FI_PROF_SM_ACTIVE{" + label * (4_000 // len(label))
    assert parse_activity(f"{hostile}\n{short}\n{valid}") == {("GPU-a", 1): 500_000}
