"""OTLP/HTTP for traces: routes, content types and responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from wattspan.http.messages import HttpRequest, HttpResponse, plain_response
from wattspan.ingest.request_limits import ReceiverBusyError
from wattspan.ingest.trace_receiver import RejectedSpans, TraceReceiver
from wattspan.sdk import OTLP_TRACES_PATH
from wattspan.util.encoding import CODINGS, GrpcStatus, InvalidBodyError
from wattspan.util.protobuf import encode_export_response, encode_status

_UNSUPPORTED_SIGNALS = {
    "/v1/metrics": ("metrics", "OTEL_METRICS_EXPORTER=none"),
    "/v1/logs": ("logs", "OTEL_LOGS_EXPORTER=none"),
    "/v1development/profiles": ("profiles", "no exporter of profiles"),
}
_MAX_MESSAGE = 500  # characters
_CODINGS = {"": "", "identity": "", "x-gzip": "gzip", **{each: each for each in CODINGS}}
_OF_REASON = {
    "malformed": (HTTPStatus.BAD_REQUEST, GrpcStatus.INVALID_ARGUMENT),
    "too_large": (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, GrpcStatus.RESOURCE_EXHAUSTED),
}


class _ContentFormat(NamedTuple):
    """The content type of a request, and the encoders of its response."""

    content_type: str
    encode_response: Callable[[RejectedSpans], bytes]
    encode_status: Callable[[int, str], bytes]

    def error(
        self, status: HTTPStatus, code: int, message: str, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        body = self.encode_status(code, message[:_MAX_MESSAGE])
        return HttpResponse(status, body, self.content_type, headers or {})


def _json_response(rejected: RejectedSpans) -> bytes:
    if not rejected.spans:
        return b"{}"
    partial = {"rejectedSpans": str(rejected.spans), "errorMessage": rejected.reason}
    return msgspec.json.encode({"partialSuccess": partial})


_PROTOBUF = _ContentFormat(
    "application/x-protobuf", lambda rejected: encode_export_response(*rejected), encode_status
)
_JSON = _ContentFormat(
    "application/json",
    _json_response,
    lambda code, message: msgspec.json.encode({"code": code, "message": message}),
)
_FORMATS = {each.content_type: each for each in (_PROTOBUF, _JSON)}


class OtlpHttpHandler:
    """Handles the HTTP requests for one receiver."""

    def __init__(self, receiver: TraceReceiver) -> None:
        self._receiver = receiver

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path != OTLP_TRACES_PATH:
            return _not_found(request.path)
        if request.method != "POST":
            return plain_response(
                HTTPStatus.METHOD_NOT_ALLOWED, "Send spans with the method POST.", {"Allow": "POST"}
            )
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        format_ = _FORMATS.get(content_type)
        if format_ is None:
            return plain_response(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Send spans as {' or '.join(_FORMATS)}.",
                {"Accept-Post": ", ".join(_FORMATS)},
            )
        coding = _CODINGS.get(request.headers.get("content-encoding", "").strip().lower())
        if coding is None:
            return format_.error(  # a collector logs the sentence of a Status only
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                GrpcStatus.UNIMPLEMENTED,
                f"Send spans uncompressed or compressed with {' or '.join(CODINGS)}, as "
                "OTEL_EXPORTER_OTLP_COMPRESSION=gzip does, or a collector with compression: gzip.",
                {"Accept-Encoding": ", ".join((*CODINGS, "identity"))},
            )
        return await self._take(request, format_, coding)

    async def _take(
        self, request: HttpRequest, format_: _ContentFormat, coding: str
    ) -> HttpResponse:
        try:
            rejected = await self._receiver.receive(
                request.body, request.peer, json=format_ is _JSON, coding=coding
            )
        except ReceiverBusyError as busy:
            return format_.error(
                HTTPStatus.SERVICE_UNAVAILABLE,
                GrpcStatus.UNAVAILABLE,
                "Too many spans wait for their energy.",
                {"Retry-After": str(max(1, math.ceil(busy.seconds)))},
            )
        except InvalidBodyError as error:
            self._receiver.sink.refuse(error.reason)
            return format_.error(*_OF_REASON[error.reason], str(error))
        return HttpResponse(HTTPStatus.OK, format_.encode_response(rejected), format_.content_type)


def _not_found(path: str) -> HttpResponse:
    if path in _UNSUPPORTED_SIGNALS:
        signal, remedy = _UNSUPPORTED_SIGNALS[path]
        sentence = f"wattspan takes spans only, no {signal}: set {remedy} in the application."
    else:
        sentence = f"There is nothing here; spans are sent to {OTLP_TRACES_PATH}."
    return plain_response(HTTPStatus.NOT_FOUND, sentence)
