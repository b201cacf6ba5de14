"""Pods of GPUs in answers of kubelets, CDI specifications and ResourceSlices that others wrote.

A file has ``[[pod]]`` tables with their ``claims`` or the ``devices`` of plugins, ``[node]`` with
the files of the node (its CDI specifications, ``/proc/driver/nvidia`` and ``/sys/class/drm``),
perhaps ``slices``, the text of the API server's answer, and ``[expected]``: ``devices`` as lists of
device, namespace, pod and container, and the words that the findings contain.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, build_tree, field_cases
from testbed.kubelet import encode_claims, encode_pods

from wattspan.processes.claimed_gpus import (
    ClaimedGpus,
    NodeGpus,
    ResourceSlices,
    decode_slices,
    read_specifications,
)
from wattspan.processes.pod_resources import (
    decode_allotments,
)


@pytest.mark.parametrize("case", field_cases("pod_resources"))
def test_pods_lead_to_gpus(case: FieldCase, tmp_path: Path) -> None:
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
    by_plugin = {
        (one["namespace"], one["pod"]): {one["container"]: one["devices"]}
        for one in case["pod"]
        if "devices" in one
    }
    by_claim = [one for one in case["pod"] if "claims" in one]
    allotted = decode_allotments(encode_pods(by_plugin) + encode_claims(by_claim))
    found, failures = claimed.find(allotted.claims)
    devices = sorted({*claimed.by_uuid(allotted.devices), *found})
    assert [list(one) for one in devices] == case["expected"].get("devices", [])
    expected = case["expected"].get("findings", [])
    assert len(failures) == len(expected)
    for one, words in zip(failures, expected, strict=True):
        assert all(word in str(one) for word in words), str(one)
