"""Who sends: the host and the agent, as OpenTelemetry names them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from wattspan.model import Snapshot
from wattspan.ports import ConfigError
from wattspan_exporters.otlp.wire import Value

MACHINE_ID_PATHS = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))

_NAMESPACE = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
"""For ``service.instance.id`` made from something else; OpenTelemetry's semantic conventions."""


class ResourceAttributes:
    """The attributes of the resource of a snapshot.

    They stay the same over restarts, so that a receiver sees the same series go on. What the
    operator says wins over what the environment says, and that over what the agent knows.
    """

    def __init__(
        self,
        version: str,
        *,
        configured: Mapping[str, str],
        environ: Mapping[str, str],
        machine_id: str,
    ) -> None:
        self._version = version
        self._machine_id = machine_id
        self._told: dict[str, str] = {}
        if service := environ.get("OTEL_SERVICE_NAME"):
            self._told["service.name"] = service
        elsewhere = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._told = (
            parse_attributes(elsewhere, "OTEL_RESOURCE_ATTRIBUTES") | self._told | dict(configured)
        )

    def __call__(self, snapshot: Snapshot) -> dict[str, Value]:
        known: dict[str, Value] = {
            "service.name": "wattspan",
            "service.version": self._version,
            "service.instance.id": self._instance(snapshot.host),
            "host.name": snapshot.host,
        }
        if snapshot.emulated:
            known["wattspan.emulated"] = True
        elif self._machine_id:
            known["host.id"] = self._machine_id
        return known | self._told

    def _instance(self, host: str) -> str:
        # The host's name is in it for emulated hosts, which share the machine of the true one.
        return str(uuid.uuid5(_NAMESPACE, f"wattspan/{self._machine_id}/{host}"))


def machine_id(places: tuple[Path, ...] = MACHINE_ID_PATHS) -> str:
    """This machine's own id; "" if it has none, as in some containers."""
    for place in places:
        try:
            found = place.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if found and found.isalnum():
            return found
    return ""


def configured_attributes(text: str) -> dict[str, str]:
    """Those of the setting ``resource``; ConfigError says which pair is none."""
    return parse_attributes(text, "[exporters.otlp] resource")


def parse_attributes(text: str, where: str) -> dict[str, str]:
    """``name=value`` pairs with commas between, percent-encoded, as OTEL_RESOURCE_ATTRIBUTES.

    ConfigError, which names ``where``, says which pair is none.
    """
    found: dict[str, str] = {}
    for number, pair in enumerate(text.split(","), start=1):
        if not pair.strip():
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise ConfigError(f'{where}, pair {number}: it is not of the form "name=value".')
        found[unquote(name)] = unquote(value)
    return found
