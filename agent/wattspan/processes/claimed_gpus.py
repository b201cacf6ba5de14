"""The GPUs of devices that Kubernetes gave to pods.

Devices of Dynamic Resource Allocation are named by driver, pool and device. Their GPUs are found
by two kinds of documents:

- Container Device Interface: a driver describes each device that it gives to a container in a
  specification of the node, in ``/etc/cdi`` or ``/var/run/cdi``, as YAML or JSON (CDI 0.3 to 1.1).
  The name of a device is ``VENDOR/CLASS=DEVICE``.
- ResourceSlices of the Kubernetes API server, which drivers publish for a node. The agent reads
  them only if the operator sets the node's name. It needs the right to list ``resourceslices`` and
  no other. Format: ``resource.k8s.io`` v1, v1beta2 and v1beta1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic  # noqa: TID251 - an age on this host
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from wattspan.model import DevicePod, Failure, Trouble
from wattspan.util.http_get import OK, FetchError, client_context, http_get

# -------------------------------------------------------------------- specifications of the node

DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""The later one has precedence."""

MAX_FILES = 2000
_MAX_SPECIFICATION = 4 << 20

_NVIDIA = re.compile(r"(?:.*/)?dev/nvidia([0-9]+)")
_DRM = re.compile(r"(?:.*/)?dev/dri/((?:card|renderD)[0-9]+)")
_MIG = re.compile(r"(?:.*/)?dev/nvidia-caps/nvidia-cap[0-9]+")
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def decode_specification(text: str, *, is_json: bool) -> dict[str, tuple[str, ...]]:
    """The device nodes of the host by device name; ValueError for a text of another form.

    A device without a valid form is left out, and keeps no other from being read.
    """
    try:
        document = msgspec.json.decode(text) if is_json else msgspec.yaml.decode(text)
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"not readable: {error}") from None
    (specification,) = _dictionaries([document]) or [{}]
    kind = specification.get("kind")
    found: dict[str, tuple[str, ...]] = {}
    for device in _dictionaries(specification.get("devices")):
        name = device.get("name")
        if isinstance(name, str | int):
            found[f"{kind}={name}"] = tuple(_nodes(device.get("containerEdits")))
    return found


def _nodes(edits: Any) -> Iterator[str]:
    nodes = edits.get("deviceNodes") if isinstance(edits, dict) else None
    for node in _dictionaries(nodes):
        path = node.get("hostPath") or node.get("path")
        if isinstance(path, str):
            yield path


def _dictionaries(values: Any) -> list[dict[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def read_specifications(directories: Sequence[Path] = DIRECTORIES) -> Mapping[str, tuple[str, ...]]:
    """The device nodes by device name, of all readable specifications of this node."""
    found: dict[str, tuple[str, ...]] = {}
    for directory in directories:
        try:
            files = sorted(directory.iterdir())[:MAX_FILES]
        except OSError:
            continue
        for file in files:
            if file.suffix in {".json", ".yaml"}:
                with suppress(OSError, ValueError):
                    if file.stat().st_size <= _MAX_SPECIFICATION:
                        text = file.read_text("utf-8")
                        found |= decode_specification(text, is_json=file.suffix == ".json")
    return found


class NodeGpus:
    """The GPUs of device nodes: NVIDIA's by UUID, others by PCI address."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._nvidia = proc / "driver" / "nvidia" / "gpus"
        self._drm, self._platform = sys / "class/drm", sys / "devices/platform"
        self._kfd = sys / "class/kfd/kfd/topology/nodes"  # of AMD

    def of(self, nodes: Sequence[str]) -> frozenset[str]:
        """The whole GPUs among the nodes of one device; of a partition of AMD, the whole board.

        The nodes of a MIG instance include its board's: they name no instance. NVIDIA's boards
        have nodes for graphics too.
        """
        if any(map(_MIG.fullmatch, nodes)):
            return frozenset()
        nvidia = [int(match[1]) for match in map(_NVIDIA.fullmatch, nodes) if match is not None]
        if nvidia:
            uuids = self._uuids()
            return frozenset(uuids[minor] for minor in nvidia if minor in uuids)
        drm = (match[1] for match in map(_DRM.fullmatch, nodes) if match is not None)
        return frozenset(filter(None, map(self._address, drm)))

    def _address(self, name: str) -> str | None:
        """The PCI address of a graphics device, or of the board of which it is a partition."""
        try:
            address = (self._drm / name / "device").resolve(strict=True).name
        except (OSError, RuntimeError):
            return None
        return address if _PCI.fullmatch(address) else self._board_of(name.removeprefix("renderD"))

    def _board_of(self, render: str) -> str | None:
        """The board of a partition of an AMD GPU by its render node.

        Its location is that of the board, with its number in the function or above the bus.
        """
        for file in self._kfd.glob("*/properties"):
            with suppress(OSError, ValueError, KeyError):
                facts = dict(line.split() for line in file.read_text("ascii").splitlines())
                if facts["drm_render_minor"] == render:
                    place, domain = int(facts["location_id"]), int(facts["domain"])
                    return f"{domain:04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.0"
        return None

    def named(self, node: str) -> str:
        """The board with a node, or the partition with a platform device; else ``node``."""
        nodes = [f"/dev/{node}", f"/dev/dri/{node}"]
        nodes += (f"/dev/dri/{one.name}" for one in (self._platform / node / "drm").glob("render*"))
        return next(iter(self.of(nodes)), node)

    def _uuids(self) -> dict[int, str]:
        """The UUIDs of NVIDIA's boards by the minor numbers of their nodes."""
        found: dict[int, str] = {}
        with suppress(OSError):
            for board in self._nvidia.iterdir():
                with suppress(OSError, ValueError, KeyError):
                    lines = (board / "information").read_text("utf-8").splitlines()
                    facts = {key.strip(): value.strip() for key, _, value in map(_halves, lines)}
                    found[int(facts["Device Minor"])] = facts["GPU UUID"]
        return found


def _halves(line: str) -> tuple[str, str, str]:
    return line.partition(":")


def is_gpu(nodes: Sequence[str]) -> bool:
    """True if there is a GPU's among the nodes."""
    return any(_NVIDIA.fullmatch(node) or _DRM.fullmatch(node) for node in nodes)


# ----------------------------------------------------------------- ResourceSlices of the cluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
VERSIONS = ("v1", "v1beta2", "v1beta1")
TIMEOUT = 5.0  # seconds
_MAX_SLICES = 16 << 20
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
    for item in _dictionaries(items):
        spec = _table(item.get("spec"))
        pool = _table(spec.get("pool"))
        driver, name, generation = spec.get("driver"), pool.get("name"), pool.get("generation", 0)
        if not (isinstance(driver, str) and isinstance(name, str) and isinstance(generation, int)):
            continue
        newest[driver, name] = max(generation, newest.get((driver, name), generation))
        for facts in _dictionaries(spec.get("devices")):
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


def fetch_slices(node: str, account: Path = ACCOUNT) -> dict[DeviceKey, str]:
    """The devices of a node by the API server of this cluster; SlicesError."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host:
        raise SlicesError("there is no API server: the agent runs outside of a cluster")
    try:
        token = (account / "token").read_text("ascii").strip()
        trust = client_context(str(account / "ca.crt"))
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
                url, timeout=TIMEOUT, most=_MAX_SLICES, headers=headers, trust=trust
            )
        except FetchError as error:
            raise SlicesError(str(error)) from None
        if status == OK and len(body) <= _MAX_SLICES:
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


# ---------------------------------------------------------------------------------------- claims

_NODE = re.compile(
    r"(?P<node>nvidia[0-9]+|card[0-9]+|amdgpu_xcp_[0-9]+)(?P<instance>/gi[0-9]+)?"
    r"(?:/vgpu[0-9]+|-[0-9]+)?"
)
"""A board, instance or partition, or a share of it, as plugins of GKE, Intel and AMD name them."""


class Claim(NamedTuple):
    """A device that Dynamic Resource Allocation gave to a container, with its CDI names."""

    namespace: str
    pod: str
    container: str
    key: DeviceKey
    cdi: tuple[str, ...] = ()

    def of(self, identity: str) -> DevicePod:
        return DevicePod(identity, self.namespace, self.pod, self.container)


class ClaimedGpus:
    """Finds the GPUs of pods.

    Those of claims are found by CDI first, then by the API server's ResourceSlices, if set.
    A device may be claimed by several pods, also with administrative access: each is listed.
    """

    def __init__(
        self,
        specifications: Callable[[], Mapping[str, tuple[str, ...]]] = read_specifications,
        gpus: NodeGpus | None = None,
        slices: ResourceSlices | None = None,
    ) -> None:
        self._specifications = specifications
        self._gpus = gpus or NodeGpus()
        self._slices = slices

    def find(self, claims: Sequence[Claim]) -> tuple[tuple[DevicePod, ...], tuple[Failure, ...]]:
        """The GPUs of the claims, and the claims of GPUs that cannot be found."""
        if not claims:
            return (), ()
        specified = self._specifications()
        found: set[DevicePod] = set()
        missing: list[Claim] = []
        for claim in claims:
            nodes = [node for name in claim.cdi for node in specified.get(name, ())]
            gpus = self._gpus.of(nodes)
            found.update(map(claim.of, gpus))
            if not gpus and (is_gpu(nodes) or (not nodes and _names_gpu(claim.key))):
                missing.append(claim)
        if missing and self._slices is not None:
            known = self._slices.identities({claim.key for claim in missing})
            found.update(claim.of(known[claim.key]) for claim in missing if claim.key in known)
            missing = [claim for claim in missing if claim.key not in known]
        return tuple(sorted(found)), tuple(self._failures(missing))

    def by_uuid(self, devices: Sequence[DevicePod]) -> tuple[DevicePod, ...]:
        """The devices of plugins, boards that are named by their node as the agent names them.

        No file of the node has the UUID of a MIG instance, which keeps its name without a share.
        """
        return tuple(one._replace(device=self._uuid_of(one.device)) for one in devices)

    def _uuid_of(self, device: str) -> str:
        match = _NODE.fullmatch(device)
        if match is None:
            return device
        if match["instance"]:
            return match["node"] + match["instance"]
        return self._gpus.named(match["node"])

    def _failures(self, missing: Sequence[Claim]) -> Iterator[Failure]:
        if self._slices is not None and self._slices.trouble:
            yield Failure(
                "pods",
                f"the ResourceSlices of node {self._slices.node} from the API server",
                Trouble.RETRY,
                self._slices.trouble,
                "Use packaging/kubernetes/components/resource-slices, which grants the right to "
                "list them and opens the network policy.",
            )
        if missing:
            keys = sorted({str(claim.key) for claim in missing})
            pods = len({(claim.namespace, claim.pod) for claim in missing})
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            searched = "" if self._slices is None else ", and no ResourceSlice has its UUID"
            yield Failure(
                "pods",
                f"the UUID of {keys[0]}{more}, claimed by {pods} pods",
                Trouble.ABSENT,
                f"no CDI specification of the node leads to a whole GPU{searched}",
                "Mount /var/run/cdi of the node, read-only, or set [processes] kubernetes_node. "
                "CDI names no MIG instances.",
            )


def _names_gpu(key: DeviceKey) -> bool:
    """True for a driver of GPUs, such as gpu.nvidia.com; others' devices are of no interest."""
    return key.driver.startswith("gpu.")
