"""OTLP/HTTP: what the protocol asks of a server, for traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.ingest import wire
from wattspan.ingest.export_request import (
    MalformedRequestError,
    ReceiverBusyError,
    RequestTooLargeError,
)
from wattspan.ingest.trace_receiver import RejectedSpans, RequestReader, TraceReceiver
from wattspan.util.encoding import BodyEncodingError, BodyTooLongError

TRACES_PATH = "/v1/traces"

_UNSUPPORTED_SIGNALS = {
    "/v1/metrics": ("metrics", "OTEL_METRICS_EXPORTER=none"),
    "/v1/logs": ("logs", "OTEL_LOGS_EXPORTER=none"),
    "/v1development/profiles": ("profiles", "no exporter of profiles"),
}
_PLAIN_LIMIT = 500  # characters of a message


class _ContentFormat(NamedTuple):
    """A content type, in which the answer is given as well."""

    content_type: str
    answer: Callable[[RejectedSpans], bytes]
    status: Callable[[int, str], bytes]


class OtlpHttpHandler:
    """Handles requests for one intake."""

    def __init__(self, intake: TraceReceiver) -> None:
        self._reader = RequestReader(intake)

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path != TRACES_PATH:
            return _unsupported_signal(request.path)
        if request.method != "POST":
            return _plain(
                HTTPStatus.METHOD_NOT_ALLOWED, "Spans are sent by POST.", {"Allow": "POST"}
            )
        format_ = _FORMATS.get(_first_value(request.headers.get("content-type", "")))
        if format_ is None:
            return _plain(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Spans are sent as {' or '.join(_FORMATS)}.",
                {"Accept-Post": ", ".join(_FORMATS)},
            )
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            return _plain(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "Spans are sent as they are or compressed by gzip.",
                {"Accept-Encoding": "gzip, identity"},
            )
        return await self._take(request, format_, zipped="gzip" in encoding)

    async def _take(
        self, request: HttpRequest, format_: _ContentFormat, *, zipped: bool
    ) -> HttpResponse:
        intake = self._reader.intake
        try:
            refused = await self._reader.take(
                request.body, request.peer, json=format_ is _JSON, zipped=zipped
            )
        except ReceiverBusyError as busy:
            return _failed(
                format_,
                HTTPStatus.SERVICE_UNAVAILABLE,
                _UNAVAILABLE,
                "Too many spans wait for their energy.",
                {"Retry-After": str(max(1, math.ceil(busy.seconds)))},
            )
        except (RequestTooLargeError, BodyTooLongError) as error:
            intake.sink.refuse("too_large")
            return _failed(
                format_, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _RESOURCE_EXHAUSTED, str(error)
            )
        except (MalformedRequestError, BodyEncodingError) as error:
            intake.sink.refuse("malformed")
            return _failed(format_, HTTPStatus.BAD_REQUEST, _INVALID_ARGUMENT, str(error))
        return HttpResponse(HTTPStatus.OK, format_.answer(refused), format_.content_type)


# ------------------------------------------------------------------------------ what is answered

_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNAVAILABLE = 3, 8, 14  # google.rpc.Code


def _protobuf_answer(refused: RejectedSpans) -> bytes:
    return wire.response(refused.spans, refused.why)


def _json_answer(refused: RejectedSpans) -> bytes:
    if not refused.spans:
        return b"{}"
    told = {"rejectedSpans": str(refused.spans), "errorMessage": refused.why}
    return msgspec.json.encode({"partialSuccess": told})


def _json_status(code: int, message: str) -> bytes:
    return msgspec.json.encode({"code": code, "message": message})


_PROTOBUF = _ContentFormat("application/x-protobuf", _protobuf_answer, wire.status)
_JSON = _ContentFormat("application/json", _json_answer, _json_status)
_FORMATS = {each.content_type: each for each in (_PROTOBUF, _JSON)}


def _failed(
    format_: _ContentFormat,
    status: HTTPStatus,
    code: int,
    message: str,
    headers: Mapping[str, str] | None = None,
) -> HttpResponse:
    return HttpResponse(
        status, format_.status(code, message[:_PLAIN_LIMIT]), format_.content_type, headers or {}
    )


def _plain(
    status: HTTPStatus, sentence: str, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    return HttpResponse(status, f"{sentence}\n".encode(), headers=headers or {})


def _unsupported_signal(path: str) -> HttpResponse:
    if path in _UNSUPPORTED_SIGNALS:
        what, remedy = _UNSUPPORTED_SIGNALS[path]
        sentence = f"wattspan takes spans only, no {what}: set {remedy} in the application."
    else:
        sentence = f"There is nothing here; spans are sent to {TRACES_PATH}."
    return _plain(HTTPStatus.NOT_FOUND, sentence)


def _first_value(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
