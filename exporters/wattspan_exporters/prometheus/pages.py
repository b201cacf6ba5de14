"""What is served, apart from how: the scrape, the state of health, the live page."""

from __future__ import annotations

import gzip
import threading
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape

from wattspan.http.access_policy import CHALLENGES, TokenCheck, admit_all
from wattspan.http.connection_limiter import CountRejection, RejectionReason, ignore_rejection
from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock, SnapshotView
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.labels import clean
from wattspan_exporters.metric import Metric
from wattspan_exporters.page.answer import Page, Request, plain
from wattspan_exporters.page.site import Site
from wattspan_exporters.prometheus.itself import Itself
from wattspan_exporters.prometheus.negotiate import accepts_gzip, choose_format, names_this_machine
from wattspan_exporters.prometheus.render import Format, Renderer
from wattspan_exporters.prometheus.text import number

HEALTH = "/healthz"

STALE = 60 * SECOND
"""Older than this, the newest snapshot is news of the past and the agent is not well."""


_NOT_HERE = (
    "Only this machine is served here, by the name localhost or an address; a proxy in front "
    'has to send "Host: localhost".'
)


_UNKNOWN = (
    "A token is needed, of those in the agent's token_file: as a bearer token, or as the password "
    "of any user."
)


class Pages:
    """Makes the pages from the newest snapshot, which asking for them never changes.

    A scrape is rendered once for each snapshot and format: whoever asks meanwhile gets the same
    bytes. Safe from any thread.
    """

    def __init__(
        self,
        view: SnapshotView,
        clock: Clock,
        version: str,
        itself: Itself,
        site: Site | None = None,
        aliases: Sequence[Metric] = (),
        *,
        guarded: bool = False,
        admits: TokenCheck = admit_all,
        count: CountRejection = ignore_rejection,
    ) -> None:
        """``guarded``: only this machine is served, so only its own names are right.

        ``admits`` says whether an Authorization header is that of a client; how an agent is
        anybody may ask.
        """
        self._view, self._clock, self._version, self._itself = view, clock, version, itself
        self._site, self._guarded = site, guarded
        self._admits, self._count = admits, count
        self._renderer = Renderer((*CATALOGUE, *aliases))
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._bodies: dict[tuple[Format, bool], bytes] = {}

    def get(self, request: Request) -> Page:
        """The answer to a request."""
        path, zipped = request.path, accepts_gzip(request.accept_encoding)
        if self._guarded and not names_this_machine(request.host):
            self._count(RejectionReason.NAME)
            return plain(421, _NOT_HERE)
        if path == HEALTH:
            return self._health()
        if not self._admits(request.authorization):
            self._count(RejectionReason.TOKEN)
            return plain(401, _UNKNOWN, ("WWW-Authenticate", CHALLENGES))
        if path == "/metrics":
            return self._metrics(choose_format(request.accept), zipped)
        if self._site is not None:
            page = self._site.get(path, zipped, request.if_none_match)
            if page is not None:
                return page
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
        f"<p>Where the joules of {escape(clean(snapshot.host))} go: {len(cover)} domains, {watts}, "
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
