"""Responses of other servers: a Prometheus that serves a rate, a collector that receives data."""

from __future__ import annotations

import base64
import gzip
from dataclasses import replace
from pathlib import Path

from fuzz.registry import target
from fuzz.supply import Supply, folder, one_line
from wattspan.footprint.cost import billionths
from wattspan.footprint.price_and_carbon import NumberError, parse_number, read_number
from wattspan.model import SECOND
from wattspan.otlp.destination import LOGS, METRICS, SPANS
from wattspan.otlp.grpc_transport import result_of_reply
from wattspan.otlp.transport import (
    MAX_RESPONSE_SIZE,
    MAX_RETRY_DELAY,
    ExportResult,
    ExportStatus,
    parse_retry_after,
    result_of_grpc,
    result_of_http,
)
from wattspan.processes.claimed_gpus import (
    NodeGpus,
    SlicesError,
    decode_slices,
    decode_specification,
)
from wattspan.util.grpc_client import GrpcReply
from wattspan.util.protobuf import (
    encode_export_response,
    encode_status,
    retry_delay,
    status_message,
)

_NOW = 1_700_000_000 * SECOND
_LARGEST_COUNT = 2**63 - 1


@target(
    "rate-answer",
    whose="the Prometheus server with a price or an intensity",
    holds="one number, or one sentence with the reason",
    watched=(
        "wattspan.footprint.price_and_carbon",
        "wattspan.footprint.cost",
        "wattspan.model.settings",
    ),
    samples=(
        b'{"status":"success","data":{"resultType":"scalar","result":[1700000000,"0.25"]}}',
        b'{"status":"success","data":{"resultType":"vector","result":[{"value":[1,"12"]}]}}',
        b'{"status":"error","error":"query timed out"}',
    ),
    words=(b'"NaN"', b'"+Inf"', b"1e400", b"9" * 400, b"null", b"[" * 3000, b'"\\ud800"', b"{}"),
)
def rate_answer(data: bytes) -> None:
    try:
        found = parse_number(data)
    except NumberError as error:
        one_line(str(error), 300)
        return
    rate = billionths(found)
    assert rate is None or rate >= 0


@target(
    "rate-file",
    whose="the writer of a rate file",
    holds="one number, or one sentence with the reason",
    watched=("wattspan.footprint.price_and_carbon", "wattspan.footprint.cost"),
    samples=(b"0.25\n", b"  12", b"nan"),
    words=(b"1e400", b"9" * 400, b"_", b"-", b"\xff"),
)
def rate_file(data: bytes) -> None:
    with folder() as path:
        (path / "rate").write_bytes(data)
        try:
            found = read_number(path / "rate", _NOW)
        except NumberError as error:
            one_line(str(error), 300)
            return
        rate = billionths(found.number)
        assert rate is None or rate >= 0


def _sound(answer: ExportResult) -> None:
    one_line(answer.why, 700)
    one_line(answer.remedy, 300)
    assert 0 <= answer.rejected <= _LARGEST_COUNT
    assert answer.after is None or 0 <= answer.after <= MAX_RETRY_DELAY


_KINDS = ("application/json", "application/x-protobuf", "text/plain", "text/html", "")
_STATUSES = (200, 202, 301, 400, 401, 404, 413, 429, 500, 502, 503, 504)


def _http(kind: int, status: int, headers: bytes, body: bytes) -> bytes:
    return bytes([kind, status, 0, len(headers)]) + headers + body


@target(
    "collector-http",
    whose="the collector of spans, metrics and logs",
    holds="a verdict, one line of text, a bounded delay and count",
    watched=("wattspan.otlp",),
    samples=(
        _http(0, 0, b"", b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"too old"}}'),
        _http(1, 0, b"", encode_export_response(3, "too old")),
        _http(1, 7, b"120", encode_status(8, "slow down", 4)),
        _http(2, 10, b"Wed, 21 Oct 2026 07:28:00 GMT", b"try later"),
    ),
    words=(b"partialSuccess", b"rejectedSpans", b"1e400", b"9" * 400, b"[" * 3000, b"Infinity"),
)
def collector_http(data: bytes) -> None:
    supply = Supply(data)
    kind, status = supply.pick(_KINDS), supply.pick(_STATUSES)
    signal = supply.pick((SPANS, METRICS, LOGS))
    header = supply.chunk().decode("latin-1")
    body = supply.rest()
    _sound(
        result_of_http(
            status,
            body,
            content_type=kind,
            retry_after=header,
            location=header,
            now=_NOW,
            signal=signal,
        )
    )


@target(
    "collector-grpc",
    whose="the collector of spans, metrics and logs",
    holds="a verdict, one line of text, a bounded delay",
    watched=("wattspan.otlp",),
    samples=(
        bytes([8]) + encode_status(8, "slow down", 4),
        bytes([14]) + encode_status(14, "\x1b[31mred", 2**40),
        bytes([16]) + encode_status(16, "who are you?"),
    ),
    words=(b"type.googleapis.com/google.rpc.RetryInfo", b"\xff" * 9 + b"\1"),
)
def collector_grpc(data: bytes) -> None:
    supply = Supply(data)
    code, details = supply.byte(), supply.rest()
    after = retry_delay(details)
    assert after is None or after >= 0
    _sound(result_of_grpc(code, "STATUS", status_message(details), after, SPANS))


_ENCODINGS = ("gzip", "identity", "snappy", None)
_HTTP_STATUSES = ("200", "204", "400", "404", "503", "", None)
_GRPC_KINDS = ("application/grpc", "application/grpc+proto", "text/html", None)


def _reply(flag: int, message: bytes, *, encoding: int = 0, status: bytes = b"0") -> bytes:
    details = base64.b64encode(encode_status(14, "slow down", 4))
    return (
        bytes([0, 0, encoding, 1, flag, len(status)])
        + status
        + bytes([4])
        + b"busy"
        + bytes([len(details)])
        + details
        + message
    )


@target(
    "collector-reply",
    whose="the collector of spans, metrics and logs",
    holds="as `collector-grpc`; OK is accepted; a message decodes identically, compressed or not",
    watched=("wattspan.otlp", "wattspan.util.encoding"),
    samples=(
        _reply(0, encode_export_response(3, "too old")),
        _reply(1, gzip.compress(encode_export_response(3, "too old"), mtime=0)),
        _reply(1, gzip.compress(bytes(4 * MAX_RESPONSE_SIZE), mtime=0)),
        _reply(1, b"", encoding=1),
        _reply(0, b"", status=b"14"),
    ),
    words=(b"\x1f\x8b\x08", b"16", b"-1", b"000000000014", b"%00", b"\xff"),
)
def collector_reply(data: bytes) -> None:
    supply = Supply(data)
    head = {
        ":status": supply.pick(_HTTP_STATUSES),
        "content-type": supply.pick(_GRPC_KINDS),
        "grpc-encoding": supply.pick(_ENCODINGS),
    }
    headers = {name: value for name, value in head.items() if value is not None}
    follows, flag = supply.byte() % 2, supply.byte()
    tail = {
        "grpc-status": supply.chunk().decode("latin-1"),
        "grpc-message": supply.text(),
        "grpc-status-details-bin": supply.chunk().decode("latin-1"),
    }
    message = supply.rest()
    reply = GrpcReply(
        headers if follows else headers | tail, flag, message, tail if follows else {}
    )
    answer = result_of_reply(reply, SPANS)
    _sound(answer)
    assert (answer.verdict is ExportStatus.TAKEN) == (reply.status[0] == 0)
    assert not (reply.blames_encoding and answer.verdict is ExportStatus.TAKEN)
    if flag == 0:
        zipped = gzip.compress(message, compresslevel=1)
        named = {**reply.headers, "grpc-encoding": "gzip"}
        assert (
            result_of_reply(replace(reply, headers=named, flag=1, message=zipped), SPANS) == answer
        )


@target(
    "retry-after",
    whose="the collector, or a proxy before it",
    holds="a delay from nothing to ten minutes, or none",
    watched=("wattspan.otlp.transport", "email._parseaddr", "email.utils"),
    samples=(b"120", b"Wed, 21 Oct 2026 07:28:00 GMT", b"Fri, 31 Dec 9999 23:59:59 -2359"),
    words=(b"GMT", b"+9999", b"Jan", b"9" * 30, b"-", b":", b"0001"),
)
def retry_after(data: bytes) -> None:
    for text in (data.decode("latin-1"), data.decode("utf-8", "replace")):
        delay = parse_retry_after(text, _NOW)
        assert delay is None or 0 <= delay <= MAX_RETRY_DELAY


@target(
    "cdi-specification",
    whose="drivers of devices on the node, and administrators",
    holds="device nodes by qualified names, or ValueError",
    watched=("wattspan.processes.claimed_gpus",),
    samples=(
        b"---\ncdiVersion: 0.5.0\ndevices:\n- containerEdits:\n    deviceNodes:\n"
        b"    - hostPath: /run/dev/nvidia0\n      path: /dev/nvidia0\n  name: gpu-0\nkind: v/c\n",
        b'{"kind": "v/c", "devices": [{"name": "0", "containerEdits": {"deviceNodes": ['
        b'{"path": "/dev/dri/card0"}]}}]}',
        b"kind: \"v/c\"\ndevices:\n  - name: '0' # first\n    containerEdits: {}\na: |\n  b: c\n",
    ),
    words=(b"- ", b": ", b"\n  ", b"\n", b"'", b'"', b" #", b"|", b"---\n", b"[" * 3000, b"\t"),
)
def cdi_specification(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for is_json in (True, False):
        try:
            found = decode_specification(text, is_json=is_json)
        except ValueError:
            continue
        for name, nodes in found.items():
            assert "=" in name
            assert all(isinstance(node, str) for node in nodes)
            NodeGpus(Path("/nonexistent"), Path("/nonexistent")).of(nodes)


@target(
    "resource-slices",
    whose="the Kubernetes API server, with attributes by drivers of devices",
    holds="one identity for each device, or one sentence",
    watched=("wattspan.processes.claimed_gpus",),
    samples=(
        b'{"items": [{"spec": {"driver": "gpu.nvidia.com", "pool": {"name": "n", "generation": 2},'
        b' "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-a"}}}]}}]}',
        b'{"items": [{"spec": {"driver": "d", "pool": {"name": "n"}, "devices": [{"name": "g", '
        b'"basic": {"attributes": {"pciAddr": {"string": "0:1"}}}}]}}]}',
    ),
    words=(b"null", b"[]", b"{}", b'""', b"[" * 3000, b"1e400", b'"\\ud800"', b'"generation": 3'),
)
def resource_slices(data: bytes) -> None:
    try:
        found = decode_slices(data)
    except SlicesError as error:
        one_line(str(error), 300)
        return
    assert all(found.values())
    assert all(isinstance(part, str) for key in found for part in key)
