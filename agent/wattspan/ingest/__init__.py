"""Spans coming in: OTLP from any language, and start records from instrumented processes."""
