"""`wattspan top` tells of tuning what metrics do not: it asks the agent of its own host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.query_server import QueryServer
from support.snapshots import busy_host
from support.tuned import ACCOUNTS
from wattspan.cli.top.scraping import AgentView, MetricsScraper
from wattspan.clock import SystemClock
from wattspan.model import Snapshot, TuningAccounts
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer


def watching(snapshot: Snapshot, run_dir: Path) -> AgentView:
    """A view of an agent whose metrics tell ``snapshot``."""
    text = Renderer().render(snapshot, ExpositionFormat.TEXT).decode()
    return AgentView(MetricsScraper("agent:1", SystemClock(), lambda _: text), (str(run_dir),))


def test_the_tuning_of_the_agent_of_this_host_is_told(tmp_path: Path) -> None:
    here = replace(busy_host(), host="testhost")
    with QueryServer(tmp_path, tuning=lambda: ACCOUNTS):
        view = watching(here, tmp_path)()
    assert view.tuning == ACCOUNTS
    assert view.host == "testhost"


def test_the_tuning_of_this_host_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    elsewhere = replace(busy_host(), host="node7")
    with QueryServer(tmp_path, tuning=lambda: ACCOUNTS):
        assert watching(elsewhere, tmp_path)().tuning.rows == ()


def test_without_an_answer_the_metrics_are_shown_all_the_same(tmp_path: Path) -> None:
    view = watching(replace(busy_host(), host="testhost"), tmp_path)
    assert view().tuning == TuningAccounts()
    assert len(view().domains) == len(busy_host().domains)
    assert view.notice == ""
