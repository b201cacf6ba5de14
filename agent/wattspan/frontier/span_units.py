"""Units of work in the spans of a command: a receiver for one trial."""

from __future__ import annotations

import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path

from wattspan.frontier.work import Completion, Completions, UnitSpan
from wattspan.http.access_policy import AccessPolicy
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_tcp, listen_unix
from wattspan.ingest.export_request import (
    MAX_NAME,
    ExportRequest,
    RequestedAttributes,
    WorkAttribute,
)
from wattspan.ingest.otlp_http import OtlpHttpHandler
from wattspan.ingest.trace_receiver import TraceReceiver
from wattspan.model import SECOND
from wattspan.ports import Clock, ConfigError
from wattspan.sdk import API_SOCKET, OTLP_HTTP_SOCKET, OTLP_TRACES_PATH
from wattspan.spans.waiting_spans import ReceiptDelay
from wattspan.spans.wall_time import WallClockConverter

_MAX_REQUEST = 16 << 20  # bytes
_MAX_FUTURE = SECOND
"""Permitted distance of a span's end ahead of the clock, for clocks that are corrected."""

_MARGIN = SECOND
"""For exports that are later than the earlier ones, on a busy host."""

_EXPORT_INTERVAL = "500"  # milliseconds
_OTHER_NAMES = 5  # in the message of a failure
_END = attrgetter("at")


class SpanUnits:
    """The completed work in received spans. Written by the server's thread.

    ``environ`` are the variables by which the command sends its spans here.
    """

    def __init__(self, unit: UnitSpan, clock: Clock) -> None:
        self._unit, self._clock = unit, clock
        self._name = unit.name[:MAX_NAME]
        self.environ: Mapping[str, str] = {}
        self._wall = WallClockConverter()
        self._wall.observe(clock.now())
        self._lock = threading.Lock()
        self._receipt = ReceiptDelay()
        self._completions: list[Completion] = []
        self._known: set[int] = set()
        self._others: dict[str, None] = {}
        self._invalid = self._refused = 0

    def accept(self, delivery: ExportRequest) -> None:
        """Count the units of a request; a repeated span, and one that ends later, is ignored."""
        with self._lock:
            self._wall.observe(self._clock.now())
            for part in delivery.parts:
                if not part.spans:
                    continue
                starts = list(map(self._wall.monotonic, part.spans.start))
                ends = list(map(self._wall.monotonic, part.spans.end))
                self._receipt.add(starts, ends, delivery.received)
                for span, end in zip(part.spans, ends, strict=True):
                    if span.name != self._name:
                        if len(self._others) < _OTHER_NAMES:
                            self._others[span.name] = None
                        continue
                    # With the times: processes that are seeded alike have spans with equal ids.
                    key = hash((span.trace, span.id, span.start, span.end))
                    if key in self._known or end > delivery.received + _MAX_FUTURE:
                        continue
                    self._known.add(key)
                    work = span.work if self._unit.attribute else 1.0
                    if work is None or not 0 < work < float("inf"):
                        self._invalid += 1
                        continue
                    self._completions.append(Completion(end, work))

    def refuse(self, reason: str, spans: int = 1) -> None:
        """Count spans that cannot be read."""
        with self._lock:
            self._refused += spans

    def completions(self, until: int | None = None) -> Sequence[Completion]:
        """The work up to ``until``, in the order of the spans' ends (monotonic)."""
        with self._lock:
            self._completions.sort()  # nearly sorted already, which takes little time
            known = len(self._completions)
            if until is not None:
                known = bisect_right(self._completions, until, key=_END)
            return Completions(islice(self._completions, known)).found

    @property
    def delay(self) -> int:
        """Nanoseconds from the end of a span until it has been received, for nearly all spans."""
        with self._lock:
            return self._receipt.hold + _MARGIN

    @property
    def trouble(self) -> str:
        """The reason why there is no unit, with its remedy; "" if there are some."""
        with self._lock:
            name, attribute = self._unit
            if self._completions:
                return ""
            if self._invalid:
                return (
                    f"It sent {self._invalid} spans {name!r} without a number above 0 in the"
                    f" attribute {attribute!r}. Name another attribute in --unit, or none."
                )
            if self._others:
                names = ", ".join(map(repr, self._others))
                return f"It sent no span {name!r}, but spans such as {names}. Check --unit."
            if self._refused:
                return f"It sent {self._refused} requests or spans that cannot be read."
            return (
                "It sent no spans. Let it send them by OTLP/HTTP to the address in"
                " OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which is set for each trial."
            )


@dataclass(frozen=True, slots=True)
class SpanReceiver:
    """Receives the spans of each trial at an address of its own.

    ``directories`` are those of the running agent, ``environ`` are the variables of the command.
    ConfigError if they disable spans.
    """

    unit: UnitSpan
    clock: Clock
    directories: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        if self.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            raise ConfigError(
                f"--unit span:{self.unit.name}: OTEL_SDK_DISABLED=true disables all spans of the"
                " command. Unset it, or use --unit stdout:REGEX."
            )

    @contextmanager
    def open(self) -> Iterator[SpanUnits]:
        """Receive spans until the end of the context. ListenError."""
        units = SpanUnits(self.unit, self.clock)
        name, attribute = self.unit.name[:MAX_NAME], self.unit.attribute
        searched = (WorkAttribute(attribute, span=name),) if attribute else ()
        asked = RequestedAttributes(work=lambda: searched, presets=())
        receiver = TraceReceiver(units, self.clock, asked, max_request=_MAX_REQUEST)
        handler = OtlpHttpHandler(receiver)
        policy = AccessPolicy(browsers=False)
        # Faults of a sender's connection are seen by the missing spans.
        server = HttpServer(self.clock, log=lambda message: None, name="frontier")
        with tempfile.TemporaryDirectory(prefix="wattspan-frontier-") as folder:
            run_dir = Path(folder)
            self._link_agent(run_dir)
            try:
                listening = listen_tcp("127.0.0.1", 0, what="spans", setting="--unit")
                address = f"http://{server.add_http(listening, handler, policy)}"
                listening = listen_unix(run_dir / OTLP_HTTP_SOCKET, 0o600, what="spans")
                server.add_http(listening, handler, policy)
                server.start()
                units.environ = self._variables(address, folder)
                yield units
            finally:
                server.stop()

    def _link_agent(self, run_dir: Path) -> None:
        """Let the command ask the agent in this run directory, too."""
        sockets = (Path(each, API_SOCKET).absolute() for each in self.directories)
        for path in sockets:
            if path.exists():
                (run_dir / API_SOCKET).symlink_to(path)
                return

    def _variables(self, address: str, run_dir: str) -> dict[str, str]:
        """Variables of the command: its spans come here, soon after their ends.

        The general address stays if it is set, because other signals use it. ``wattspan.training``
        sends to the socket in the run directory where the command has no exporter of its own.
        """
        general = "OTEL_EXPORTER_OTLP_ENDPOINT"
        return {
            general: self.environ.get(general) or address,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{address}{OTLP_TRACES_PATH}",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_BSP_SCHEDULE_DELAY": _EXPORT_INTERVAL,
            "WATTSPAN_RUN_DIR": run_dir,
        }
