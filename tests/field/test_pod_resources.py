"""Pods of GPUs in answers of kubelets, CDI specifications and ResourceSlices that others wrote.

A file has ``[[pod]]`` tables with their ``claims``, ``[node]`` with the files of the node (its CDI
specifications, ``/proc/driver/nvidia`` and ``/sys/class/drm``), perhaps ``slices``, the text of
the API server's answer, and ``[expected]``: ``devices`` as lists of device, namespace, pod and
container, and the words that the findings contain.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.field import FieldCase, build_tree, field_cases
from support.kubelet import encode_claims
from wattspan.processes.cdi import NodeGpus, read_specifications
from wattspan.processes.pod_resources import ClaimedGpus, decode_allotments
from wattspan.processes.resource_slices import ResourceSlices, decode_slices


@pytest.mark.parametrize("case", field_cases("pod_resources"))
def test_claims_lead_to_gpus(case: FieldCase, tmp_path: Path) -> None:
    node = build_tree(case.get("node", {}), tmp_path)
    text = case.get("slices")
    slices = None
    if text is not None:
        slices = ResourceSlices("node-1", lambda _: decode_slices(text.encode()))
    claimed = ClaimedGpus(
        lambda: read_specifications((node / "etc/cdi", node / "var/run/cdi")),
        NodeGpus(node / "proc", node / "sys"),
        slices,
    )
    devices, failures = claimed.find(decode_allotments(encode_claims(case["pod"])).claims)
    assert [list(one) for one in devices] == case["expected"].get("devices", [])
    expected = case["expected"].get("findings", [])
    assert len(failures) == len(expected)
    for one, words in zip(failures, expected, strict=True):
        assert all(word in str(one) for word in words), str(one)
