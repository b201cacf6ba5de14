"""Container Device Interface: device nodes of named devices, and the GPUs that the nodes belong to.

A device driver of Kubernetes describes each device that it gives to a container in a specification
of the node, in ``/etc/cdi`` or ``/var/run/cdi``, as YAML or JSON (CDI 0.3 to 1.1). The name of
a device is ``VENDOR/CLASS=DEVICE``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

DIRECTORIES = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""The later one has precedence."""

MAX_FILES = 2000
MAX_BYTES = 4 << 20

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
                    if file.stat().st_size <= MAX_BYTES:
                        text = file.read_text("utf-8")
                        found |= decode_specification(text, is_json=file.suffix == ".json")
    return found


class NodeGpus:
    """The GPUs of device nodes: NVIDIA's by UUID, others by PCI address."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._nvidia = proc / "driver" / "nvidia" / "gpus"
        self._drm = sys / "class" / "drm"

    def of(self, nodes: Sequence[str]) -> frozenset[str]:
        """The whole GPUs among the nodes of one device.

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
        """The PCI address of a graphics device."""
        try:
            address = (self._drm / name / "device").resolve(strict=True).name
        except (OSError, RuntimeError):
            return None
        return address if _PCI.fullmatch(address) else None

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
