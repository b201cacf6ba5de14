"""Debian's Chromium, driven by Playwright, and everything that a page may not do in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page


class Tab:
    """A page in a browser, with its errors."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrongs: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.wrongs.append(f"error: {error}"))
        page.on("console", self._heard)
        page.on("request", lambda request: self.asked.append(request.url))

    def _heard(self, message: Any) -> None:
        # the browser logs a refused request for the server that the test stops
        away = "ERR_CONNECTION_REFUSED" in message.text or "ERR_CONNECTION_RESET" in message.text
        if message.type in ("error", "warning") and not away:
            self.wrongs.append(f"{message.type}: {message.text}")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()


@contextmanager
def opened(browser: Browser, url: str, *, clock: bool = False, **settings: Any) -> Iterator[Tab]:
    """The live page at ``url`` in a context of its own, once it shows figures; it does no wrong.

    With ``clock``, the test advances the time on the page, in addition to real time.
    """
    with closing(
        browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
    ) as context:
        tab = Tab(context.new_page())
        if clock:
            tab.page.clock.install()
        tab.page.goto(url)
        tab.page.wait_for_selector("#figures .big", state="attached", timeout=30_000)
        yield tab
        assert tab.wrongs == []
        assert {_origin(asked) for asked in tab.asked} <= {_origin(url), "data:"}


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else f"{parts.scheme}:"
