"""A request by the whole schema, the plain way: its announcement and its JSON."""

from __future__ import annotations

import base64
import json
import math
import re

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from testbed.otlp import Receiver
from wattspan.http.sockets import Peer
from wattspan.spans.values import Span


def expected(whole: ExportTraceServiceRequest) -> tuple[list[Span], set[int]]:
    """The records of a decoder with the complete schema, and the positions of rejected spans."""
    told: list[Span] = []
    skipped: set[int] = set()
    spans = [
        (one, printable(text_of(each.resource, "service.name")))
        for each in whole.resource_spans
        for scope in each.scope_spans
        for one in scope.spans
    ]
    for position, (one, service) in enumerate(spans):
        ids = usable(one.trace_id, 16) and usable(one.span_id, 8)
        if not (ids and one.start_time_unix_nano and one.end_time_unix_nano):
            skipped.add(position)
            continue
        told.append(
            Span(
                one.trace_id,
                one.span_id,
                one.parent_span_id if usable(one.parent_span_id, 8) else b"",
                service,
                printable(one.name),
                one.start_time_unix_nano,
                one.end_time_unix_nano,
                count(one, "w"),
                tokens(one, "input", "prompt"),
                tokens(one, "output", "completion"),
                work=amount(one, "w") if one.name != "idle" else None,
            )
        )
    return told, skipped


def printable(text: str) -> str:
    return "".join(c for c in text[:200] if c.isprintable() or not control(c))


def text_of(one: object, name: str) -> str:
    """The text of the first attribute of this name; "" for none."""
    pairs = one.attributes  # type: ignore[attr-defined]
    return next((pair.value.string_value for pair in pairs if pair.key == name), "")


def tokens(one: object, *names: str) -> int:
    """The first name of a token count that is present and possible."""
    counts = (amount(one, f"gen_ai.usage.{name}_tokens") for name in names)
    return next((round(found) for found in counts if found is not None and 0 <= found <= 10**7), 0)


def usable(identifier: bytes, length: int) -> bool:
    return len(identifier) == length and any(identifier)


def control(character: str) -> bool:
    point = ord(character)
    return (
        point < 0x20
        or 0x7F <= point <= 0x9F
        or 0x200B <= point <= 0x200F
        or 0x2028 <= point <= 0x202E
        or 0x2060 <= point <= 0x2069
        or point == 0xFEFF
    )


def count(one: object, name: str) -> int | None:
    for pair in one.attributes:  # type: ignore[attr-defined]
        if pair.key == name:
            value = pair.value
            match value.WhichOneof("value"):
                case "int_value":
                    number: float = value.int_value
                case "double_value":
                    number = value.double_value
                case "string_value":
                    text = value.string_value
                    ascii_digits = text.isascii() and text.isdigit() and len(text) < 20
                    number = int(text) if ascii_digits else -1
                case _:
                    return None
            return round(number) if 0 <= number < 2**63 else None
    return None


def amount(one: object, name: str) -> float | None:
    for pair in one.attributes:  # type: ignore[attr-defined]
        if pair.key == name:
            match pair.value.WhichOneof("value"):
                case "int_value":
                    return int(pair.value.int_value)
                case "double_value":
                    number = pair.value.double_value
                    return round(number, 9) if abs(number) < 2**63 else None
                case "string_value":
                    text = pair.value.string_value
                    if not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text):
                        return None
                    return round(float(text), 9) if "." in text else int(text)
            return None
    return None


def records_in_both_encodings(whole: ExportTraceServiceRequest, **options: object) -> list[Span]:
    """The records of a request's first resource, by a receiver with ``options``."""
    found = []
    for json_encoded in (False, True):
        receiver = Receiver(**options)  # type: ignore[arg-type]
        body = json_of(whole) if json_encoded else whole.SerializeToString()
        receiver.take(body, Peer(), json=json_encoded)
        found.append(list(receiver.sink.deliveries[0].parts[0].spans))
    assert found[0] == found[1]
    return found[0]


def json_of(message: ExportTraceServiceRequest) -> bytes:
    """OTLP's JSON of a request, the plain way."""

    def plain(one: object) -> dict[str, object]:
        made: dict[str, object] = {}
        for field, value in one.ListFields():  # type: ignore[attr-defined]
            made[field.json_name] = (
                [written(field, each) for each in value]
                if field.is_repeated
                else written(field, value)
            )
        return made

    def written(field: object, value: object) -> object:
        if isinstance(value, bytes):
            is_id = field.name.endswith("_id")  # type: ignore[attr-defined]
            return value.hex() if is_id else base64.b64encode(value).decode()
        if hasattr(value, "ListFields"):
            return plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return str(value) if type(value) is int and abs(value) > 2**53 else value

    return json.dumps(plain(message)).encode()
