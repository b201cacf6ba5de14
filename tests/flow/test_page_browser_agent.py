"""The live page of a real agent, on an emulated host, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from testbed.browser import opened
from testbed.drawing.browser import browser as chromium
from testbed.fixtures import entered
from testbed.program import Running
from testbed.reserved_port import reserved_port
from testbed.span_senders import made, send
from testbed.waiting import eventually

pytestmark = pytest.mark.needs_browser

DRAWN = """() => {
  const number = (element, key) => Number(element.dataset[key] ?? 0); // none: not known
  const ribbons = [...document.querySelectorAll('.ribbon')];
  const flows = (end, id) => ribbons.filter(r => r.dataset[end] === id)
    .reduce((sum, r) => sum + number(r, 'watts'), 0);
  return [...document.querySelectorAll('.node')].map(node => ({
    id: node.dataset.id, layer: node.dataset.layer, watts: number(node, 'watts'),
    into: flows('target', node.dataset.id), out: flows('source', node.dataset.id)}));
}"""


browser = entered(chromium, "module")


def page_of(agent: Running) -> str:
    return agent.address().removesuffix("metrics")


def test_devices_groups_processes_and_spans_update_live(tmp_path: Path, browser: Browser) -> None:
    with Running(tmp_path) as agent, opened(browser, page_of(agent.measuring())) as tab:
        assert "EMULATED" in tab.text("header")
        tab.page.evaluate("window.untouched = true")

        def layers() -> set[str]:
            return {node["layer"] for node in tab.page.evaluate(DRAWN)}

        # a host with busy CPUs has no idle interval meanwhile
        wanted = {"device", "type", "group", "process"}
        eventually(lambda: wanted <= layers(), "the flow from devices to processes")
        before = tab.text("#figures")
        eventually(lambda: tab.text("#figures") != before, "the figures move")

        def spent() -> bool:
            now = time.time_ns()
            assert send(agent.run_dir, [made("reckon", now - 5 * 10**8, now)]) == 200
            drawn = tab.page.evaluate(DRAWN)
            return any(node["layer"] == "span" and "reckon" in node["id"] for node in drawn)

        eventually(spent, "the span's watts are drawn")
        assert "reckon" in tab.text("#spans tbody")
        assert "package-0" in tab.text("#devices tbody")
        assert "rapl" in tab.text("#health")
        assert tab.page.evaluate("window.untouched"), "the page was never loaded anew"
        for node in tab.page.evaluate(DRAWN):
            # Each figure of the page's data is rounded to a tenth of a milliwatt.
            nearly = pytest.approx(node["watts"], abs=0.002)
            assert node["layer"] == "device" or node["into"] == nearly, node
            assert node["layer"] not in {"device", "type"} or node["out"] == nearly, node
            assert node["out"] <= node["watts"] + 0.002, node


def test_agent_outage_and_recovery_are_shown(tmp_path: Path, browser: Browser) -> None:
    with reserved_port() as port:
        listen = {"exporters__prometheus__listen": f"127.0.0.1:{port}"}
        with (
            Running(tmp_path, **listen) as agent,
            opened(browser, page_of(agent.measuring())) as tab,
        ):
            eventually(lambda: tab.text("#fresh-text") == "Live", "figures")
            assert agent.end() == 0
            eventually(lambda: "No answer for" in tab.text("#fresh-text"), "it is missed")
            with Running(tmp_path, **listen):
                eventually(lambda: tab.text("#fresh-text") == "Live", "the page goes on")
