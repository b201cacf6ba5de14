"""Who can reach what listens, as it is configured."""

from __future__ import annotations

from collections.abc import Iterator

from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.config import Config
from wattspan.config.access import AccessSettings
from wattspan.http.access_policy import exposure_warning, token_check
from wattspan.http.tls import AccessError, server_tls
from wattspan.model.settings import Listen

_SPANS = "whoever reaches it may send spans and be believed"
_FIGURES = "whoever reaches it sees every process and what it spends"


def examine_security(config: Config) -> Section:
    """Each TCP listener: whether others than this machine reach it, and by what it is guarded."""
    found: list[Finding] = []
    if config.spans.enabled:
        listens = (config.spans.http, config.spans.grpc)
        found += _listeners("spans", config.spans, listens, _SPANS, local=False)
    for name, table in config.exporters.items():
        listen = getattr(table, "listen", "")
        if isinstance(listen, Listen) and hasattr(table, "token_file"):
            found += _listeners(f"exporters.{name}", table, (listen,), _FIGURES, local=True)  # type: ignore[arg-type]
    return Section("Security", tuple(found))


def _listeners(
    what: str, settings: AccessSettings, listens: tuple[Listen, ...], risk: str, *, local: bool
) -> Iterator[Finding]:
    where = f"in [{what}]"
    try:
        server_tls(settings, what="Cannot serve", where=where, log=lambda _: None)
        token_check(settings, where=where, log=lambda _: None)
    except AccessError as error:
        yield Finding(Mark.FAIL, what, str(error))
    for listen in filter(None, listens):
        told = exposure_warning(listen, settings, where=f"[{what}]", risk=risk)
        if told:
            yield Finding(Mark.WARN, what, told)
        elif not listen.loopback:
            yield Finding(Mark.OK, what, f"{listen} is open to the network, with TLS and by proof")
        elif local and not settings.token_file:
            yield Finding(
                Mark.NOTE,
                what,
                f"{listen} serves this machine only, and every user of it",
                f"If its users should not see each other's processes, set token_file {where}.",
            )
        else:
            yield Finding(Mark.OK, what, f"{listen} serves this machine only")
