"""Load around the agent: everything that could make it keep something for ever.

All of it is this process's threads and children, and ends with it. Every failed reader is counted
by its failure; a soak without readers is inconclusive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from testbed.process_costs import stop

SERVICES = 12
NAMES = 3000
"""Span names that plain OTLP senders use in turn: more than have a series of their own."""


class Load:
    """Readers, senders and churn around one agent, until it is left."""

    def __init__(self, metrics: str, spans: str, run_dir: Path, host: Path, churn: int) -> None:
        self._metrics, self._spans = metrics, spans
        self._run_dir, self._host, self._churn = run_dir, host, churn
        self._stop = threading.Event()
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[Load]:
        page = self._metrics.removesuffix("/metrics") + "/live.json"
        parts: list[tuple[str, float, Callable[[int], None]]] = [
            ("scrapes, text", 1.0, lambda _: read(self._metrics, Accept="text/plain")),
            ("scrapes, OpenMetrics", 1.0, lambda _: read(self._metrics, Accept=OPENMETRICS)),
            ("views of the page", 1.0, lambda _: read(page, **{"Accept-Encoding": "gzip"})),
            ("OTLP requests", 0.2, self._send),
            ("short-lived processes", 1.0 / max(self._churn, 1), lambda _: end_at_once()),
            ("temporary applications", 8.0, self._visit),
        ]
        threads = [
            threading.Thread(target=self._again, args=part, name=part[0], daemon=True)
            for part in parts
        ]
        with ExitStack() as stack:
            trainer = self._application("train", str(self._host))
            stack.callback(stop, trainer)
            for thread in threads:
                thread.start()
            stack.callback(lambda: [thread.join(15) for thread in threads])
            stack.callback(self._stop.set)
            yield self
            if trainer.poll() is not None:
                self.failed["the training job ended"] += 1

    def _again(self, name: str, every: float, act: Callable[[int], None]) -> None:
        number = 0
        while not self._stop.wait(every):
            try:
                act(number)
                self.done[name] += 1
            except Exception as error:  # noqa: BLE001 - one that fails is counted; the others go on
                self.failed[f"{name}: {type(error).__name__}"] += 1
            number += 1

    def _send(self, number: int) -> None:
        """Plain OTLP: twenty spans of one of some services, under ever other names."""
        now = time.time_ns()
        spans = [
            {
                "traceId": os.urandom(16).hex(),
                "spanId": os.urandom(8).hex(),
                "name": f"request {(number * 20 + n) % NAMES}",
                "kind": 2,
                "startTimeUnixNano": str(now - 150_000_000),
                "endTimeUnixNano": str(now - n * 1_000_000),
            }
            for n in range(20)
        ]
        service = {"key": "service.name", "value": {"stringValue": f"service-{number % SERVICES}"}}
        body = {
            "resourceSpans": [
                {"resource": {"attributes": [service]}, "scopeSpans": [{"spans": spans}]}
            ]
        }
        request = urllib.request.Request(
            f"{self._spans}/v1/traces",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def _visit(self, number: int) -> None:
        """An application that comes and goes; every other is killed with its spans open."""
        process = self._application("visit", str(number))
        try:
            if number % 2:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2.5)
            else:
                process.wait(60)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _application(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.application", *words, self._spans],
            env=os.environ | {"WATTSPAN_RUN_DIR": str(self._run_dir), "OTEL_SDK_DISABLED": "false"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def read(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return bytes(answer.read())


def end_at_once() -> None:
    subprocess.run(["/bin/true"], check=True)
