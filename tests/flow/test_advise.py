"""``wattspan advise`` about a program with waiting spans, from a real agent on an emulated host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from testbed.program import ENVIRONMENT, wattspan
from testbed.requirements import ROOT
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

pytestmark = pytest.mark.exhaustive

STATIC_WATTS = 115
SECONDS = 120.0


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpanAgent]:
    """An agent that has observed one board of two at work; the process has ended."""
    folder = tmp_path_factory.mktemp("agent")
    with SpanAgent(
        folder, sources__nvml__static_watts=f"{{H100 = {STATIC_WATTS}}}", within=240.0
    ) as running:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "settings" / "distributed.py"), str(SECONDS)],
            env={
                **ENVIRONMENT,
                "WATTSPAN_RUN_DIR": str(running.run_dir),
                "WATTSPAN_EMULATED_HOST": str(running.host),
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{running.http_port}",
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        eventually(lambda: overlap(running), "the windows are evaluated", 60)
        yield running


def asked(agent: SpanAgent, *words: str) -> subprocess.CompletedProcess[str]:
    return wattspan("advise", *words, WATTSPAN_AGENT_RUN_DIR=str(agent.run_dir))


def overlap(agent: SpanAgent) -> list[dict[str, Any]]:
    found = json.loads(asked(agent, "--json").stdout)
    return [one for one in found["advice"] if one["kind"] == "overlap_communication"]


def test_waiting_is_advised_with_static_power_times_waiting_time(agent: SpanAgent) -> None:
    (one,) = overlap(agent)
    # The steps compute for 0.6 s and wait for 0.65 s on average, and a loaded host is slower.
    waited = one["joules"] / STATIC_WATTS
    assert waited == pytest.approx(0.65 / 1.25 * one["observed_seconds"], rel=0.2)
    assert one["low_joules"] < one["joules"] < one["high_joules"]
    assert (one["service"], one["static_basis"], one["provenance"]) == (
        "rank-0", "configured", "emulated",
    )  # fmt: skip


def test_unused_board_is_advised_with_its_energy(agent: SpanAgent) -> None:
    found = json.loads(asked(agent, "--json").stdout)
    (one,) = [one for one in found["advice"] if one["kind"] == "idle_board"]
    (board,) = [board for board in found["boards"] if board["hw_id"] == one["hw_id"]]
    assert one["joules"] == pytest.approx(
        board["idle_watts"] * one["observed_seconds"] * one["share"], rel=0.1
    )


def test_text_has_the_advice_of_the_document(agent: SpanAgent) -> None:
    # The agent observes on between two questions: the document is the same before and after.
    def equal() -> tuple[list[str], dict[str, Any]] | None:
        (before,), text, (after,) = overlap(agent), asked(agent).stdout, overlap(agent)
        return (text.splitlines(), after) if before["sentence"] == after["sentence"] else None

    lines, one = eventually(equal, "the sentence stays the same for three questions")
    assert lines[0].startswith("EMULATED")
    assert f"  {one['sentence']}" in lines
    assert any(f"confidence {one['confidence']}, emulated" in line for line in lines)


def test_advice_about_a_service_leaves_out_boards_without_it(agent: SpanAgent) -> None:
    found = json.loads(asked(agent, "rank-0", "--json").stdout)
    assert {one["service"] for one in found["advice"]} == {"rank-0"}


def test_unknown_service_is_refused_with_the_nearest_name(agent: SpanAgent) -> None:
    refused = asked(agent, "rank-9")
    assert refused.returncode != 0
    assert "Did you mean rank-0?" in refused.stderr
