"""Spans of OpenTelemetry's SDK for Python with text and numbers that no JSON and no UTF-8 has.

    pip install opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 \
        opentelemetry-exporter-otlp-proto-grpc==1.45.2 opentelemetry-exporter-otlp-json-http==0.66b1
    python otlp_python.py json|proto|grpc
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

PACKAGES = {"json": "json.http", "proto": "proto.http", "grpc": "proto.grpc"}

package = importlib.import_module(
    f"opentelemetry.exporter.otlp.{PACKAGES[sys.argv[1]]}.trace_exporter"
)
provider = TracerProvider(resource=Resource({"service.name": "shop", "process.pid": 4242}))
provider.add_span_processor(BatchSpanProcessor(package.OTLPSpanExporter()))
tracer = provider.get_tracer("field", "1.0")


def span(name: str, **attributes: Any) -> None:
    made = tracer.start_span(
        name, attributes={k.replace("__", "."): v for k, v in attributes.items()}
    )
    made.add_event("happened", {"note": name})
    made.end()


span("first")
span("numbers", nan=float("nan"), infinite=-float("inf"), large=2**60, real=0.1, yes=True)
span("arrays", list=["a", "b"], numbers=[1.5, float("nan")], raw=b"\0\xff")
span("tokens", gen_ai__usage__input_tokens=12, gen_ai__usage__output_tokens=34)
if sys.argv[2:] == ["surrogate"]:
    span("half", note="a\ud83d")
span("last")
provider.force_flush()
provider.shutdown()
