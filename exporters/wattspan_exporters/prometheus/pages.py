"""What a client wants and whom it means, by its headers.

Not prometheus-client's chooser: that one takes the first format it knows and leaves out the
quality values, by which a client says that it would rather have another.

What is served, apart from how: the scrape, the state of health, the live page.
"""

from __future__ import annotations

import gzip
import ipaddress
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from html import escape
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from wattspan.api.snapshot import SNAPSHOT_PATH, snapshot_document
from wattspan.http.access_policy import CHALLENGES, TokenCheck, admit_all
from wattspan.http.connection_limiter import CountRejection, RejectionReason, ignore_rejection
from wattspan.model import SECOND, Snapshot
from wattspan.ports import Clock, SnapshotView
from wattspan_exporters.catalogue.metric import Metric, sanitize
from wattspan_exporters.catalogue.metrics import CATALOGUE
from wattspan_exporters.page.site import LivePage, PageRequest, PageResponse, plain_response
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer, format_number
from wattspan_exporters.prometheus.self_metrics import SelfMetrics


class AcceptOffer(NamedTuple):
    """One element of an Accept header."""

    value: str
    parameters: dict[str, str]
    quality: float


def choose_format(accept: str) -> ExpositionFormat:
    """The format a client likes best; the plain text format if it names none that there is."""
    wanted = [
        (offer.quality, form) for offer in _offers(accept) if (form := _offered_format(offer))
    ]
    best = max((quality for quality, _ in wanted), default=0.0)
    if best <= 0:
        return ExpositionFormat.TEXT
    return next(form for quality, form in wanted if quality == best)


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client takes gzip; what it says of gzip itself outweighs what it says of ``*``."""
    said = {offer.value: offer.quality for offer in _offers(accept_encoding)}
    return said.get("gzip", said.get("*", 0.0)) > 0


LOCAL_HOST_NAMES = frozenset(
    {"localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback"}
)
"""Other names that distributions give the loopback addresses; no name server gives them away."""


def is_local_host_header(host: str) -> bool:
    """Whether a Host header can be that of a client on this machine.

    A page from anywhere may let its own name lead to 127.0.0.1 and then read, in the visitor's
    browser, what is served there as if it were its own. The browser tells by which name it asks:
    an address, or ``localhost``, is nobody else's.
    """
    if not host:  # no browser leaves it out
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if f".{name}".endswith(".localhost") or name in LOCAL_HOST_NAMES:
            return True
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _offered_format(offer: AcceptOffer) -> ExpositionFormat | None:
    version = offer.parameters.get("version")
    if offer.value == "application/openmetrics-text":
        return ExpositionFormat.OPENMETRICS if version in (None, "1.0.0") else None
    if offer.value in ("text/plain", "text/*", "*/*"):
        return ExpositionFormat.TEXT if version in (None, "0.0.4") else None
    return None


def _offers(header: str) -> list[AcceptOffer]:
    return [_offer(element) for element in header.split(",") if element.strip()]


def _offer(element: str) -> AcceptOffer:
    value, *rest = (part.strip() for part in element.split(";"))
    parameters = {
        name.strip().lower(): text.strip().strip('"')
        for name, separator, text in (part.partition("=") for part in rest)
        if separator
    }
    return AcceptOffer(value.lower(), parameters, _quality(parameters.get("q", "1")))


def _quality(text: str) -> float:
    """A quality value that cannot be read says nothing, so it does not count against it."""
    try:
        quality = float(text)
    except ValueError:
        return 1.0
    return quality if 0 <= quality <= 1 else 1.0


HEALTH_PATH = "/healthz"

STALE_AFTER = 60 * SECOND
"""Older than this, the newest snapshot is news of the past and the agent is not well."""


_WRONG_HOST = (
    "Only this machine is served here, by the name localhost or an address; a proxy in front "
    'has to send "Host: localhost".'
)


_AUTHENTICATION_REQUIRED = (
    "A token is needed, of those in the agent's token_file: as a bearer token, or as the password "
    "of any user."
)


class MetricsPages:
    """Makes the pages from the newest snapshot, which asking for them never changes.

    A scrape is rendered once for each snapshot and format: whoever asks meanwhile gets the same
    bytes. Safe from any thread.
    """

    def __init__(
        self,
        view: SnapshotView,
        clock: Clock,
        version: str,
        itself: SelfMetrics,
        site: LivePage | None = None,
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
        self._bodies: dict[tuple[str, bool], bytes] = {}

    def get(self, request: PageRequest) -> PageResponse:
        """The answer to a request."""
        path, zipped = request.path, accepts_gzip(request.accept_encoding)
        if self._guarded and not is_local_host_header(request.host):
            self._count(RejectionReason.NAME)
            return plain_response(421, _WRONG_HOST)
        if path == HEALTH_PATH:
            return self._health()
        if not self._admits(request.authorization):
            self._count(RejectionReason.TOKEN)
            return plain_response(401, _AUTHENTICATION_REQUIRED, ("WWW-Authenticate", CHALLENGES))
        if path == "/metrics":
            return self._metrics(choose_format(request.accept), zipped)
        if path == SNAPSHOT_PATH:
            return self._snapshot_document(zipped)
        if self._site is not None:
            page = self._site.get(path, zipped, request.if_none_match)
            if page is not None:
                return page
        if path == "/":
            return _landing(self._view(), self._version)
        return plain_response(404, "There is nothing here; the metrics are at /metrics.")

    def _metrics(self, form: ExpositionFormat, zipped: bool) -> PageResponse:
        body = self._body(form, zipped, partial(self._render, form))
        self._itself.answered(form)
        return _negotiated(form.value, body, zipped)

    def _render(self, form: ExpositionFormat, snapshot: Snapshot) -> bytes:
        began = self._clock.monotonic()
        body = self._renderer.render(snapshot, form, self._itself.render(form))
        self._itself.rendered(self._clock.monotonic() - began)
        return body

    def _snapshot_document(self, zipped: bool) -> PageResponse:
        body = self._body("snapshot", zipped, self._encode)
        return _negotiated("application/json", body, zipped, ("Cache-Control", "no-store"))

    def _encode(self, snapshot: Snapshot) -> bytes:
        return msgspec.json.encode(snapshot_document(snapshot, self._version))

    def _body(self, name: str, zipped: bool, make: Callable[[Snapshot], bytes]) -> bytes:
        """``make`` of the newest snapshot, made once for each snapshot."""
        with self._lock:
            snapshot = self._view()
            if snapshot is not self._snapshot:
                self._bodies.clear()
                self._snapshot = snapshot
            plain = self._bodies.get((name, False))
            if plain is None:
                plain = self._bodies[name, False] = make(snapshot)
            if not zipped:
                return plain
            body = self._bodies.get((name, True))
            if body is None:
                # Level 1 takes a tenth of the default's time for a fifth more bytes.
                body = gzip.compress(plain, compresslevel=1, mtime=0)
                self._bodies[name, True] = body
            return body

    def _health(self) -> PageResponse:
        age = self._clock.monotonic() - self._view().at.mono
        if age > STALE_AFTER:
            return plain_response(503, f"The newest snapshot is {age // SECOND} s old.")
        return plain_response(200, "ok")


def _negotiated(
    content_type: str, body: bytes, zipped: bool, *more: tuple[str, str]
) -> PageResponse:
    headers = (("Content-Type", content_type), ("Vary", "Accept, Accept-Encoding"), *more)
    return PageResponse(200, (*headers, ("Content-Encoding", "gzip")) if zipped else headers, body)


_STYLE = (
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:40rem;margin:3rem auto;padding:0 1rem}"
    "strong{background:#fd0;color:#000;padding:0 .3em}"
)


def _landing(snapshot: Snapshot, version: str) -> PageResponse:
    """A page for people: no script, nothing from elsewhere."""
    cover = snapshot.cover
    powers = [account.power for account in cover if account.power is not None]
    watts = f"{format_number(sum(powers), 3)} W now" if powers else "power not known yet"
    joules = format_number(sum(account.energy for account in cover), 6)
    notice = (
        "<p><strong>Emulated host</strong>: these figures are true of no machine.</p>"
        if snapshot.emulated
        else ""
    )
    page = (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>wattspan</title>'
        f"<style>{_STYLE}</style><h1>wattspan</h1>{notice}"
        f"<p>Where the joules of {escape(sanitize(snapshot.host))} go: {len(cover)} domains, "
        f"{watts}, {joules} J counted.</p>"
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
    return PageResponse(200, headers, page.encode())
