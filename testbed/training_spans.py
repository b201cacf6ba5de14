"""A training run whose spans stay in memory, and the agent's answers to its declaration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

SERVICE = "trainer"


class FakeDeclaration:
    """A declared job of ``wattspan.sdk.jobs``."""

    def __init__(self, decision: str = "accepted", reason: str = "", failure: str = "") -> None:
        self.name = self.service = SERVICE
        self.decision, self.reason = decision, reason
        self.renewals = 0
        self.withdrawals = 0
        self._failure = failure

    def renew(self) -> None:
        self.renewals += 1
        if self._failure:
            raise RuntimeError(self._failure)

    def withdraw(self) -> None:
        self.withdrawals += 1


@dataclass
class RecordedTraining:
    """Pass ``**options`` to a loop or a callback, and look at what it has reported."""

    answer: FakeDeclaration = field(default_factory=FakeDeclaration)
    declared: list[dict[str, Any]] = field(default_factory=list)
    service: str = SERVICE

    def __post_init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self.provider = TracerProvider(
            resource=Resource({"service.name": self.service}), shutdown_on_exit=False
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))

    @property
    def options(self) -> dict[str, Any]:
        return {"provider": self.provider, "declare": self._declare}

    def _declare(self, **wish: Any) -> FakeDeclaration:
        self.declared.append(wish)
        return self.answer

    def spans(self, name: str) -> list[ReadableSpan]:
        """The ended spans of a name, in the order of their ends."""
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def values(self, name: str, attribute: str) -> list[Any]:
        """An attribute of the ended spans of a name; None where it is absent."""
        return [(span.attributes or {}).get(attribute) for span in self.spans(name)]

    @property
    def steps(self) -> list[int]:
        """The numbers of the units of work."""
        return self.values("train_step", "wattspan.step")

    @property
    def work(self) -> list[float | None]:
        return self.values("train_step", "wattspan.work")

    @property
    def parts(self) -> int:
        return len(self.spans("train_step_part"))

    @property
    def epochs(self) -> list[int]:
        return self.values("epoch", "wattspan.epoch")
