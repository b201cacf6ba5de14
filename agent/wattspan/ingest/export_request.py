"""Why a whole request cannot be taken, in words for its sender.

What a receiver hands on: the spans of one request as they were told, nobody believed yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from wattspan.http.messages import Peer


class MalformedRequestError(ValueError):
    """This is no request; the message says where it is not."""


class RequestTooLargeError(ValueError):
    """The request is larger than is taken."""


def too_many_spans(most: int) -> RequestTooLargeError:
    """There are more spans, or more of what they are wrapped in, than ``most``."""
    return RequestTooLargeError(f"a request has at most {most} spans")


def too_many_fields(what: str, most: int) -> RequestTooLargeError:
    """``what``, such as "a span", has more fields, attributes, events and links than ``most``."""
    return RequestTooLargeError(
        f"{what} has at most {most} fields, attributes, events and links together"
    )


class ResourceClaim(NamedTuple):
    """What a resource says of the process its spans belong to; "" and None are nothing."""

    service: str = ""
    pid: int | None = None
    created: str = ""  # process.creation.time, ISO 8601
    container: str = ""  # container.id


class SpanRecord(NamedTuple):
    """One span as it was told. Times are Unix nanoseconds, ``parent`` is b"" for none.

    ``work`` is how much work the span says it did, as the number that was told, also where that
    cannot be (0, or less); None where it tells none, or where nobody asked.
    """

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    start: int
    end: int
    thread: int = 0
    weight: int | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    work: float | None = None


class WorkAttribute(NamedTuple):
    """Which spans count their work, and in which attribute; "" is every service, every span."""

    attribute: str
    service: str = ""
    span: str = ""


class ResourceSpanRecords(NamedTuple):
    """The spans of one resource, in the order of the request."""

    claim: ResourceClaim
    spans: list[SpanRecord]


@dataclass(slots=True)
class ExportRequest:
    """One accepted request.

    ``message`` is the request, an ExportTraceServiceRequest as it was received: protobuf bytes.
    It is kept only where it is to be forwarded; its spans and those of ``parts`` are the same in
    the same order, except that spans with unusable ids stand in ``message`` alone, and their flat
    positions in ``skipped``.
    """

    peer: Peer
    received: int  # monotonic nanoseconds
    size: int  # bytes, after decompression
    parts: tuple[ResourceSpanRecords, ...]
    message: Any = None
    skipped: frozenset[int] = frozenset()

    @property
    def count(self) -> int:
        return sum(len(part.spans) for part in self.parts)


class ReceiverBusyError(Exception):
    """There is no room now; come again after ``seconds``."""

    def __init__(self, seconds: int = 1) -> None:
        super().__init__(f"come again in {seconds} s")
        self.seconds = seconds


class SpanSink(Protocol):
    """Takes deliveries; called in the receivers' thread, returns at once."""

    def accept(self, delivery: ExportRequest) -> None:
        """Take it, or raise BusyError. A delivery that was taken is never lost silently."""
        ...

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that a receiver could not take: ``invalid_id``, ``malformed``, ..."""
        ...
