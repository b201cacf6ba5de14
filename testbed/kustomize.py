"""The subset of kustomize that packaging/kubernetes uses: resources, components, JSON patches,
files.

Any other field of a kustomization is an error.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]
_KNOWN = {
    "apiVersion",
    "kind",
    "namespace",
    "nameSuffix",
    "labels",
    "resources",
    "components",
    "configMapGenerator",
    "patches",
}
_CLUSTERED = {"Namespace", "ClusterRole", "ClusterRoleBinding"}


def built(folder: Path) -> list[Resource]:
    """Resources of a kustomization. A generated name has no hash."""
    said = kustomization(folder)
    found: list[Resource] = []
    for name in said.get("resources", ()):
        path = (folder / name).resolve()
        found += built(path) if path.is_dir() else documents(path)
    for generated in said.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text(encoding="utf-8") for name in generated["files"]}
        found.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": generated["name"]},
                "data": data,
            }
        )
    for name in said.get("components", ()):
        _apply((folder / name).resolve(), found)
    _patch(said, found)
    _common(said, found)
    return found


def kustomization(folder: Path) -> Resource:
    (said,) = documents(folder / "kustomization.yaml")
    if unknown := set(said) - _KNOWN:
        raise AssertionError(f"{folder}: {unknown} is not understood here")
    return said


def documents(path: Path) -> list[Resource]:
    return parsed(path.read_text(encoding="utf-8"))


def parsed(text: str) -> list[Resource]:
    """The documents of a YAML text; libyaml's parser is ten times as fast as that in Python."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return [one for one in yaml.load_all(text, loader) if one]


def _apply(folder: Path, found: list[Resource]) -> None:
    """Resources and patches of a component."""
    said = kustomization(folder)
    assert said["kind"] == "Component", folder
    for name in said.get("resources", ()):
        found += documents(folder / name)
    for name in said.get("components", ()):
        _apply((folder / name).resolve(), found)
    _patch(said, found)


def _common(said: Resource, found: list[Resource]) -> None:
    _rename(found, said.get("nameSuffix", ""))
    for resource in found:
        metadata = resource["metadata"]
        for labels in said.get("labels", ()):
            metadata["labels"] = {**metadata.get("labels", {}), **labels["pairs"]}
        if "namespace" in said and resource["kind"] not in _CLUSTERED:
            metadata["namespace"] = said["namespace"]


def _rename(found: list[Resource], suffix: str) -> None:
    """The suffix of every name and of every reference to it."""
    for daemons in of_kind(found, "DaemonSet"):
        pod = daemons["spec"]["template"]["spec"]
        for referring in [pod, *(v["configMap"] for v in pod["volumes"] if "configMap" in v)]:
            key = "serviceAccountName" if referring is pod else "name"
            referring[key] += suffix
    for resource in found:
        if resource["kind"] not in _CLUSTERED:
            resource["metadata"]["name"] += suffix


def _patch(said: Resource, found: list[Resource]) -> None:
    for patch in said.get("patches", ()):
        target = patch["target"]
        chosen = [
            one
            for one in found
            if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        assert len(chosen) == 1, f"a patch is for {target}, and that is {len(chosen)} resources"
        for operation in yaml.safe_load(patch["patch"]):
            _operate(chosen[0], operation)


def _operate(resource: Resource, operation: Resource) -> None:
    """One operation of RFC 6902."""
    steps = operation["path"].lstrip("/").split("/")
    *way, last = (step.replace("~1", "/").replace("~0", "~") for step in steps)
    at: Any = resource
    for step in way:
        at = at[int(step)] if isinstance(at, list) else at[step]
    value = copy.deepcopy(operation.get("value"))
    match operation["op"], at:
        case "add", list():
            at.insert(len(at) if last == "-" else int(last), value)
        case "add", dict():
            at[last] = value
        case "replace", dict() if last in at:
            at[last] = value
        case _:
            raise AssertionError(f"{operation} cannot be done")


def of_kind(resources: list[Resource], kind: str) -> Iterator[Resource]:
    return (one for one in resources if one["kind"] == kind)
