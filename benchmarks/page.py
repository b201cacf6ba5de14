"""The live page in a browser, with the demo: its weight, its first paint, an update's cost.

Chromium loads the page of ``wattspan demo`` with an empty cache, several times; paint times are
the browser's own (``first-contentful-paint``, from the start of navigation). Then one page stays
open, and the browser's counters give its usage.

    .venv/bin/python -m benchmarks.page
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright
from testbed.machine import describe
from testbed.process_costs import LOOPBACK

from benchmarks.harness import Subject
from benchmarks.peers import ROOT, debian, free_port

STATIC = ROOT / "exporters" / "wattspan_exporters" / "page" / "static"
SETTLE = 25.0  # seconds until the demo's jobs are in the picture

PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
FIGURES = """
const seen = () => document.querySelector('.node, #list li')
  ? performance.mark('figures') : requestAnimationFrame(seen);
seen();
"""


def demo() -> Subject:
    port = free_port()
    program = ROOT / ".venv" / "bin" / "wattspan"
    return Subject(
        "wattspan",
        [program, "demo", "--plain", "--listen", f"{LOOPBACK}:{port}"],
        f"http://{LOOPBACK}:{port}/healthz",
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--loads", type=int, default=10)
    options.add_argument("--open", type=float, default=20.0, help="seconds that a page stays open")
    chosen = options.parse_args()
    program = debian("chromium")
    if program is None:
        raise SystemExit("Cannot measure the page: no browser; install Debian's chromium.")
    subject = demo()
    print(describe())
    with subject.running(), sync_playwright() as playwright:
        url = subject.url.removesuffix("healthz")
        time.sleep(SETTLE)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        bodies = [path.read_bytes() for path in STATIC.rglob("*") if path.is_file()]
        plain, zipped = (sum(map(len, of)) / 1e3 for of in (bodies, map(gzip.compress, bodies)))
        print(f"\nWeight: {plain:.1f} kB, {zipped:.1f} kB with gzip (goal: 150 kB)")
        print(f"\nMilliseconds, {chosen.loads} loads with an empty cache (goal: 1000)\n")
        print("| | median | least | most |\n|---|---|---|---|")
        loads = [load(browser, url) for _ in range(chosen.loads)]
        for what in ("first paint", "the flow is drawn"):
            took = [one[what] for one in loads]
            print(f"| {what} | {statistics.median(took):.0f} | {min(took):.0f} | {max(took):.0f} |")
        cost, updates, kilobytes = stay(browser, url, chosen.open)
        print(f"\nOpen for {chosen.open:.0f} s, {updates} updates: ", end="")
        print(f"{cost:.1f} ms of the browser's main thread an update, {kilobytes:.1f} kB each.")
        browser.close()


def load(browser: Browser, url: str) -> dict[str, float]:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script(f"addEventListener('DOMContentLoaded', () => {{ {FIGURES} }})")
    page.goto(url)
    paint = until(page, PAINT)
    drawn = until(page, "performance.getEntriesByName('figures')[0]?.startTime ?? null")
    page.context.close()
    return {"first paint": paint, "the flow is drawn": drawn}


def stay(browser: Browser, url: str, seconds: float) -> tuple[float, int, float]:
    """Milliseconds of the main thread and kilobytes for each update, and how many there were."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    sizes: list[int] = []
    page.goto(url)
    until(page, "document.querySelector('.node') ? 1 : null")
    page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, not waiting
    before = busy(session.send)
    page.wait_for_timeout(seconds * 1000)
    spent = busy(session.send) - before
    page.context.close()
    return 1000 * spent / max(1, len(sizes)), len(sizes), sum(sizes) / max(1, len(sizes)) / 1e3


def busy(ask: Callable[[str], Any]) -> float:
    """Seconds that the page's main thread has worked."""
    metrics = {one["name"]: one["value"] for one in ask("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def until(page: Page, expression: str) -> float:
    """The first value of ``expression`` that is not null."""
    return float(page.wait_for_function(f"() => {expression}").json_value())


if __name__ == "__main__":
    main()
