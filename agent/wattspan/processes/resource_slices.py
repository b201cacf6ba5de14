"""GPUs in the ResourceSlices of the Kubernetes API server, which DRA drivers publish for a node.

The agent reads them only if the operator sets the node's name. It needs the right to list
``resourceslices`` and no other. Format: ``resource.k8s.io`` v1, v1beta2 and v1beta1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from time import monotonic  # noqa: TID251 - an age on this host
from typing import Any, NamedTuple
from urllib.parse import quote

from wattspan.util.http_get import OK, FetchError, http_get

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
VERSIONS = ("v1", "v1beta2", "v1beta1")
TIMEOUT = 5.0  # seconds
MAX_BYTES = 16 << 20
INTERVAL = 300.0  # seconds between two requests
RETRY = 30.0  # seconds, while a device is missing

_NOT_FOUND = 404
_WHOLE = {"", "gpu", "amdgpu"}  # types of devices that are whole boards


class DeviceKey(NamedTuple):
    """A device of Dynamic Resource Allocation."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return "/".join(self)


class SlicesError(Exception):
    """The API server gave no ResourceSlices; the message is the cause."""


def decode_slices(body: bytes) -> dict[DeviceKey, str]:
    """The UUID, or else the PCI address of a whole board, of each device; SlicesError.

    Only the newest generation of a pool is valid.
    """
    try:
        items = json.loads(body)["items"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SlicesError("its answer is no list of ResourceSlices") from None
    newest: dict[tuple[str, str], int] = {}
    found: dict[DeviceKey, tuple[int, str]] = {}
    for item in _list(items):
        spec = _table(_table(item).get("spec"))
        pool = _table(spec.get("pool"))
        driver, name, generation = spec.get("driver"), pool.get("name"), pool.get("generation", 0)
        if not (isinstance(driver, str) and isinstance(name, str) and isinstance(generation, int)):
            continue
        newest[driver, name] = max(generation, newest.get((driver, name), generation))
        for facts in map(_table, _list(spec.get("devices"))):
            identity = _identity(driver, facts)
            if identity and isinstance(facts.get("name"), str):
                key = DeviceKey(driver, name, facts["name"])
                found[key] = max((generation, identity), found.get(key, (generation, "")))
    return {
        key: identity
        for key, (generation, identity) in found.items()
        if generation == newest[key.driver, key.pool]
    }


def _identity(driver: str, device: Mapping[str, Any]) -> str:
    attributes = _table(device.get("attributes")) or _table(
        _table(device.get("basic")).get("attributes")
    )

    def text(*names: str) -> str:
        for name in names:
            value = _table(attributes.get(name, attributes.get(f"{driver}/{name}"))).get("string")
            if isinstance(value, str) and value:
                return value
        return ""

    address = text("pcieBusID", "resource.kubernetes.io/pcieBusID", "pciAddr", "pciAddress")
    return text("uuid") or (address.lower() if text("type") in _WHOLE else "")


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def fetch_slices(node: str, account: Path = ACCOUNT) -> dict[DeviceKey, str]:
    """The devices of a node by the API server of this cluster; SlicesError."""
    import ssl  # takes 10 ms and 4 MB, and few agents ask an API server

    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host:
        raise SlicesError("there is no API server: the agent runs outside of a cluster")
    try:
        token = (account / "token").read_text("ascii").strip()
        trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise SlicesError(f"no token of a service account: {cause.lower()}") from None
    address = f"[{host}]" if ":" in host else host
    query = f"fieldSelector=spec.nodeName%3D{quote(node, safe='')}"
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    server = f"https://{address}:{port or 443}/apis/resource.k8s.io"
    status = 0
    for version in VERSIONS:
        url = f"{server}/{version}/resourceslices?{query}"
        try:
            status, body = http_get(
                url, timeout=TIMEOUT, most=MAX_BYTES, headers=headers, trust=trust
            )
        except FetchError as error:
            raise SlicesError(str(error)) from None
        if status == OK and len(body) <= MAX_BYTES:
            return decode_slices(body)
        if status != _NOT_FOUND:
            break
    raise SlicesError(
        "its answer is longer than 16 MiB" if status == OK else f"it answers HTTP {status}"
    )


class ResourceSlices:
    """The devices of one node, asked again after five minutes or for a missing device."""

    def __init__(
        self,
        node: str,
        fetch: Callable[[str], dict[DeviceKey, str]] = fetch_slices,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self.node = node
        self._fetch, self._now = fetch, now
        self._found: dict[DeviceKey, str] = {}
        self._asked: float | None = None
        self.trouble = ""
        """The cause of the last failure; "" after a success."""

    def identities(self, wanted: Collection[DeviceKey]) -> Mapping[DeviceKey, str]:
        """The identities of devices, as known now."""
        age = INTERVAL if self._asked is None else self._now() - self._asked
        if age >= INTERVAL or (age >= RETRY and not self._found.keys() >= set(wanted)):
            self._asked = self._now()
            try:
                self._found, self.trouble = self._fetch(self.node), ""
            except SlicesError as error:
                self.trouble = str(error)
        return self._found
