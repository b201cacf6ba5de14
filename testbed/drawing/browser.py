"""Draw an answered dashboard in a browser without network access."""

from __future__ import annotations

import json
import mimetypes
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Route, sync_playwright

ORIGIN = "http://dashboards.invalid"  # an invalid host name: this module answers every request
TIMEOUT = 60_000  # milliseconds
TALL = 6000  # pixels: content below the fold is not always drawn
_COLORS = """() => [...document.querySelectorAll('[data-panel]')].flatMap((panel) => {
  const canvas = panel.querySelector('canvas');
  if (!canvas) return [];
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const pixels = new Uint32Array(data.buffer);
  const { title } = window.drawing.panels.find(({ id }) => String(id) === panel.dataset.panel);
  return [[title, new Set(pixels).size]];
})"""


@dataclass(frozen=True, slots=True)
class Panel:
    """Result of one panel: its state is data, empty, text or error."""

    id: int
    title: str
    type: str
    state: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawn dashboard, with its console messages."""

    image: bytes  # PNG
    panels: tuple[Panel, ...]
    console: tuple[str, ...]  # errors and warnings
    strangers: tuple[str, ...]  # refused requests of the page to other addresses
    plots: dict[str, int]  # number of colors of each plot, by its panel's title
    text: str


@contextmanager
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a window."""
    program = shutil.which("chromium")
    if program is None:
        raise FileNotFoundError("There is no chromium to draw with; install Debian's chromium.")
    with (
        sync_playwright() as playwright,
        closing(playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])) as one,
    ):
        yield one


def draw(using: Browser, page_files: Path, document: Mapping[str, Any]) -> Drawing:
    """``document`` (of ``answers.answered``) drawn by the built page in ``page_files``."""
    console: list[str] = []
    strangers: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            console.append(message.text)

    def answer(route: Route) -> None:
        url = urlsplit(route.request.url)
        file = page_files / url.path.lstrip("/")
        if f"{url.scheme}://{url.netloc}" != ORIGIN:
            strangers.append(route.request.url)
            route.abort()
        elif url.path == "/document.json":
            route.fulfill(body=json.dumps(document), content_type="application/json")
        elif file.is_file():
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            route.fulfill(body=file.read_bytes(), content_type=kind)
        else:
            route.fulfill(status=404)

    with closing(using.new_page(viewport={"width": document["width"], "height": TALL})) as page:
        page.on("console", heard)
        page.on("pageerror", lambda error: console.append(str(error)))
        page.route("**/*", answer)
        page.goto(f"{ORIGIN}/index.html")
        page.wait_for_function("window.drawing && window.drawing.ready", timeout=TIMEOUT)
        told = page.evaluate("window.drawing")
        if failed := told.get("failed"):
            raise RuntimeError(f"The dashboard could not be drawn: {failed}")
        panels = tuple(
            Panel(one["id"], one["title"], one["type"], one["state"], tuple(one["problems"]))
            for one in told["panels"]
        )
        text = page.inner_text("body")
        image = page.locator("#dashboard").screenshot()
        plots = dict(page.evaluate(_COLORS))
        return Drawing(image, panels, tuple(console), tuple(strangers), plots, text)
