"""What is served, apart from how: the scrape, the state of health, the landing page."""

from __future__ import annotations

import gzip
import threading
from base64 import b64encode
from hashlib import sha256
from html import escape
from typing import NamedTuple

from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock, SnapshotView
from wattspan_exporters.prometheus.itself import Itself
from wattspan_exporters.prometheus.negotiate import accepts_gzip, choose_format
from wattspan_exporters.prometheus.render import Format, Renderer
from wattspan_exporters.prometheus.text import number

STALE = 60 * SECOND
"""Older than this, the newest snapshot is news of the past and the agent is not well."""


class Page(NamedTuple):
    """An answer: its status, its headers but for the length, its body."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def plain(status: int, sentence: str, *headers: tuple[str, str]) -> Page:
    kind = ("Content-Type", "text/plain; charset=utf-8")
    return Page(status, (kind, *headers), f"{sentence}\n".encode())


class Pages:
    """Makes the pages from the newest snapshot, which asking for them never changes.

    A scrape is rendered once for each snapshot and format: whoever asks meanwhile gets the same
    bytes. Safe from any thread.
    """

    def __init__(self, view: SnapshotView, clock: Clock, version: str, itself: Itself) -> None:
        self._view, self._clock, self._version, self._itself = view, clock, version, itself
        self._renderer = Renderer()
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._bodies: dict[tuple[Format, bool], bytes] = {}

    def get(self, path: str, accept: str = "", accept_encoding: str = "") -> Page:
        """The page at ``path``."""
        if path == "/metrics":
            return self._metrics(choose_format(accept), accepts_gzip(accept_encoding))
        if path == "/healthz":
            return self._health()
        if path == "/":
            return _landing(self._view(), self._version)
        return plain(404, "There is nothing here; the metrics are at /metrics.")

    def _metrics(self, form: Format, zipped: bool) -> Page:
        with self._lock:
            body = self._body(form, zipped)
        self._itself.answered(form)
        headers = (("Content-Type", form.value), ("Vary", "Accept, Accept-Encoding"))
        return Page(200, (*headers, ("Content-Encoding", "gzip")) if zipped else headers, body)

    def _body(self, form: Format, zipped: bool) -> bytes:
        snapshot = self._view()
        if snapshot is not self._snapshot:
            self._bodies.clear()
            self._snapshot = snapshot
        body = self._bodies.get((form, zipped))
        if body is None:
            if zipped:
                # Level 1 takes a tenth of the default's time for a fifth more bytes.
                body = gzip.compress(self._body(form, False), compresslevel=1, mtime=0)
            else:
                began = self._clock.monotonic()
                body = self._renderer.render(snapshot, form, self._itself.render(form))
                self._itself.rendered(self._clock.monotonic() - began)
            self._bodies[form, zipped] = body
        return body

    def _health(self) -> Page:
        age = self._clock.monotonic() - self._view().at.mono
        if age > STALE:
            return plain(503, f"The newest snapshot is {age // SECOND} s old.")
        return plain(200, "ok")


_STYLE = (
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}"
    "strong{background:#fd0;color:#000;padding:0 .3em}"
)


def _landing(snapshot: Snapshot, version: str) -> Page:
    """A page for people: no script, nothing from elsewhere."""
    cover = snapshot.cover
    powers = [account.power for account in cover if account.power is not None]
    watts = f"{number(sum(powers), 3)} W now" if powers else "power not known yet"
    joules = number(sum(account.energy for account in cover), 6)
    notice = (
        "<p><strong>Emulated host</strong>: these figures are true of no machine.</p>"
        if snapshot.emulated
        else ""
    )
    page = (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>wattspan</title>'
        f"<style>{_STYLE}</style><h1>wattspan</h1>{notice}"
        f"<p>Where the joules of {escape(snapshot.host)} go: {len(cover)} domains, {watts}, "
        f"{joules} J counted.</p>"
        '<ul><li><a href="/metrics">Metrics</a> for Prometheus, as text or OpenMetrics</li>'
        '<li><a href="/healthz">Health</a></li></ul>'
        f"<p>Version {escape(version)}</p></html>\n"
    )
    style = b64encode(sha256(_STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = (
        ("Content-Type", "text/html; charset=utf-8"),
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
    )
    return Page(200, headers, page.encode())
