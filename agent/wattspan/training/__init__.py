"""Instrumentation of training loops: units of work, their spans and the declared job."""

from __future__ import annotations

from wattspan.training.loop import Loop

__all__ = ["Loop"]
