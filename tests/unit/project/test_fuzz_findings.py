"""Findings of the fuzzers, one test each."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import msgspec
import pytest
from testbed.capper_bench import Bench, W
from testbed.fake_nvml import FakeGpu
from testbed.nvml_bench import Bench as NvmlBench

from wattspan.capper.ceilings import (
    CeilingFile,
)
from wattspan.capper.protocol import CapperRequest, CeilingRequest, RequestedCap
from wattspan.config import ConfigSchema, load
from wattspan.config.loading import parse_toml
from wattspan.model import Failure, Trouble
from wattspan.otlp.transport import ExportStatus, result_of_http
from wattspan.processes.inspector import ProcessInspector
from wattspan.processes.netlink import raise_error
from wattspan.sources.nvml.device import MAX_GPUS
from wattspan.storage.tuning import DecisionLog
from wattspan.testing import ManualClock
from wattspan.util.cpu_topology import (
    parse_cpu_list,
)
from wattspan.util.protobuf import encode_export_response, retry_delay, status_message

NUMBER_OF_400_DIGITS = "9" * 400


@pytest.mark.parametrize("text", [f"watts = {NUMBER_OF_400_DIGITS}", "watts = " + "[" * 3000])
def test_capper_survives_any_ceiling_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ceiling"
    path.write_text("watts = 900\n")
    file = CeilingFile(path, ManualClock())
    before = file.poll(None)
    assert before is not None
    path.write_text(f"{text}\n")
    found = file.poll(before)
    assert found.limit == 900 * W
    assert file.trouble.startswith(f"Cannot take a ceiling from {path}: ")


@pytest.mark.parametrize(
    "line",
    [
        '{"do":"ceiling","limit":NUMBER}',
        '{"do":"ceiling","limit":1,"ttl":NUMBER}',
        '{"do":"hold","job":"a","lease":NUMBER,"caps":[]}',
        '{"do":"hold","job":"a","caps":[{"knob":"gpu_power","device":"0","value":NUMBER}]}',
    ],
)
def test_request_to_the_capper_has_no_number_that_its_answer_could_not_hold(line: str) -> None:
    from wattspan.capper.protocol import AnyRequest

    def decoded(number: object) -> CapperRequest:
        return msgspec.json.decode(line.replace("NUMBER", str(number)), type=AnyRequest)

    assert isinstance(decoded(2**53), CapperRequest)
    for number in (2**53 + 1, -(2**60), NUMBER_OF_400_DIGITS):
        with pytest.raises(msgspec.ValidationError):
            decoded(number)
    assert CeilingRequest(limit=None).limit is None
    assert RequestedCap.__struct_fields__ == ("knob", "device", "value")


def answered(body: bytes, status: int = 200, kind: str = "application/json") -> object:
    return result_of_http(status, body, content_type=kind, retry_after="", location="", now=1)


def test_collector_s_answer_nested_without_end_is_an_answer() -> None:
    answer = answered(b'{"partialSuccess":' + b"[" * 100_000)
    assert answer.verdict is ExportStatus.TAKEN  # type: ignore[attr-defined]


def test_collector_cannot_reject_more_than_any_request_holds() -> None:
    for number in (2**63 - 1, -(2**63)):
        answer = answered(encode_export_response(number), kind="application/x-protobuf")
        assert 0 <= answer.rejected <= 2**32  # type: ignore[attr-defined]


def test_undecodable_collector_message_is_shown_escaped() -> None:
    status = b"\x12\x05slo\xff!"
    assert status_message(status) == "slo\N{REPLACEMENT CHARACTER}!"
    answer = answered(status, 429, "application/x-protobuf")
    assert "slo" in answer.why  # type: ignore[attr-defined]
    assert retry_delay(b"\x1a\x05\n\x03/\xffx") is None


def test_deeply_nested_line_of_the_decision_log_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"[" * 50_000 + b'\n{"knob":"gpu_power","at_mono_ns":1e999}\n')
    assert DecisionLog(path, ManualClock()).recent() == []


@pytest.mark.exhaustive
def test_cpu_list_size_is_bounded() -> None:
    assert list(parse_cpu_list("0-3,8")) == [0, 1, 2, 3, 8]
    assert len(list(parse_cpu_list("0-4000000000"))) <= 1 << 16
    assert len(list(parse_cpu_list(",".join(["0-999999999"] * 1000)))) <= 1 << 16


def test_error_of_netlink_that_is_cut_off_is_an_error() -> None:
    with pytest.raises(OSError, match="truncated"):
        raise_error(b"\0")
    with pytest.raises(OSError, match="unknown error"):
        raise_error(struct.pack("=i", -(2**31)))
    raise_error(struct.pack("=i", 0))


def test_truncated_status_gives_no_other_pid(tmp_path: Path) -> None:
    (tmp_path / "42").mkdir()
    (tmp_path / "loadavg").touch()
    stat = b"42 (a) S 1 " + b"0 " * 50
    (tmp_path / "42/stat").write_bytes(stat)
    (tmp_path / "42/status").write_bytes(b"Name:\ta\nTgid:\t42\nUid:\t0\t0\t0\t0\nNSpid:\t42\t77")
    witness = ProcessInspector(tmp_path)
    living = witness.look(42)
    witness.close()
    assert living.pids == (42,)  # and not 7, of which the last digit was cut off


def test_gpu_count_of_four_billion_is_bounded() -> None:
    bench = NvmlBench(FakeGpu("GPU-a"))
    asked = 0

    def handle(index: int) -> object:
        nonlocal asked
        asked += 1
        return honest(0)

    honest = bench.nvml.nvmlDeviceGetHandleByIndex
    bench.nvml.nvmlDeviceGetCount = lambda: 2**32 - 1  # type: ignore[method-assign]
    bench.nvml.nvmlDeviceGetHandleByIndex = handle  # type: ignore[method-assign]
    bench.turn()
    assert asked == MAX_GPUS


def test_name_of_a_driver_forges_no_line_of_a_log() -> None:
    bench = NvmlBench(FakeGpu("GPU-a", name="H100\nwattspan: all is well\x1b[2J" + "x" * 500))
    name = bench.turn().domains[0].name
    assert name.isprintable()
    assert len(name) < 200


def test_failure_is_one_printable_line() -> None:
    failure = Failure("store", "the store", Trouble.RETRY, "malformed\n\x1b[31mschema \x00")
    assert str(failure).isprintable()
    assert "schema" in str(failure)


def test_environment_variable_name_is_printed_escaped() -> None:
    config = load(
        None,
        environ={"WATTSPAN_AGENT\nINTERVAL": "1s"},
        schema=ConfigSchema(),
        default=Path("/nonexistent"),
    )
    (warning,) = config.warnings
    assert warning.startswith("WATTSPAN_AGENT?INTERVAL is ignored")


def test_long_configuration_line_takes_linear_time() -> None:
    def seconds(dots: int) -> float:
        text = f'x = """\n{"a." * dots}\n"""\n'
        began = time.process_time()
        parse_toml(text, Path("c.toml"))
        return time.process_time() - began

    few = min(seconds(5_000) for _ in range(3))
    many = min(seconds(80_000) for _ in range(3))
    assert many < 80 * few + 0.05  # sixteen times as long a text; squared it would be 256 times


def test_invalid_capper_files_are_tolerated(tmp_path: Path) -> None:
    (tmp_path / "journal-4a6b1c52-0000-4000-8000-000000000000.a.jsonl").write_text(
        json.dumps({"boot_id": "x", "entries": "y"})
    )
    bench = Bench(tmp_path)
    assert "entries of it are lost" in bench.journal.trouble
