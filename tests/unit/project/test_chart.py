"""The Helm chart gives the objects of the kustomize overlays, from the same files."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from testbed.kustomize import Resource, built, parsed
from testbed.requirements import PACKAGING, ROOT

CHART = ROOT / "packaging" / "helm"
SOURCES = ROOT / "packaging" / "kubernetes"
COMPONENTS = sorted(path.name for path in (SOURCES / "components").iterdir())
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
NEEDED = {
    "capper": ["gpu"],
    "fleet": ["gpu", "capper"],
    "pod-devices": ["cpu-counters"],
    "resource-slices": ["cpu-counters"],
}
"""Components that the schema requires beside another one."""


def chosen(*components: str) -> dict[str, Any]:
    return {"components": dict.fromkeys(components, True)}


OVERLAYS = {
    path.name: [
        Path(name).name
        for name in yaml.safe_load((path / "kustomization.yaml").read_text())["components"]
    ]
    for path in sorted((SOURCES / "overlays").iterdir())
}
CASES: dict[str, list[str]] = {
    "base": [],
    **OVERLAYS,
    **{f"with {one}": [*NEEDED.get(one, ()), one] for one in COMPONENTS},
    "with all": [
        *("cpu-counters", "gpu", "capper", "performance-counters", "resource-slices", "spans"),
        *("podmonitor-token", "fleet", "emulated"),
    ],
}

# --------------------------------------------------------------------- without Helm


def test_chart_offers_every_component() -> None:
    assert sorted(SCHEMA["properties"]["components"]["properties"]) == COMPONENTS
    assert sorted(VALUES["components"]) == COMPONENTS
    assert not any(VALUES["components"].values())
    template = (CHART / "templates" / "wattspan.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"range list ([^}]*?) -\}\}", template)
    assert sorted(re.findall(r'"([\w-]+)"', listed)) == COMPONENTS


def test_schema_names_every_value() -> None:
    assert SCHEMA["properties"].keys() - {"global"} == VALUES.keys()
    assert SCHEMA["additionalProperties"] is False


def test_chart_reads_the_kustomization_itself() -> None:
    """By a link; archives have a copy in its place."""
    ours, theirs = (
        {path.relative_to(folder): path.read_text() for path in folder.rglob("*.*")}
        for folder in (SOURCES, (CHART / "kubernetes").resolve())
    )
    assert ours == theirs
    assert (CHART / "kubernetes").is_symlink() or not (ROOT / ".git").exists()


# ------------------------------------------------------------------------ with Helm

PROGRAM = """
import json, sys
from helm_python import Chart, HelmError, lint
chart, cases = sys.argv[1], json.load(sys.stdin)
results = {}
with Chart.load(chart) as loaded:
    for name, (namespace, values) in cases.items():
        try:
            loaded.validate_schema(values)
            results[name] = loaded.render(values, name="energy", namespace=namespace)
        except HelmError as error:
            results[name] = str(error)
print(json.dumps([results, lint(chart, strict=True)]))
"""

exhaustive = pytest.mark.exhaustive
with_helm = pytest.mark.needs_packaging
Case = tuple[str, dict[str, Any]]


def helm(cases: dict[str, Case], chart: Path = CHART) -> tuple[dict[str, Any], dict[str, Any]]:
    """The templates of each case, or the error; and the findings of the linter."""
    done = subprocess.run(
        [PACKAGING, "-I", "-c", PROGRAM, chart],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results, findings = json.loads(done.stdout.splitlines()[-1])
    return results, findings


def objects(rendered: dict[str, str] | str) -> list[Resource]:
    assert not isinstance(rendered, str), rendered
    return parsed(rendered["wattspan/templates/wattspan.yaml"])


def indexed(resources: list[Resource]) -> dict[tuple[str, str], Resource]:
    """By kind and name; the hash that ends the name of a configuration is left out."""
    text = re.sub(r'"(wattspan)-[0-9a-f]{10}"', r'"\1"', json.dumps(resources))
    return {(one["kind"], one["metadata"]["name"]): one for one in json.loads(text)}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Resource]]:
    cases = {name: ("wattspan", chosen(*components)) for name, components in CASES.items()}
    return {name: objects(one) for name, one in helm(cases)[0].items()}


def kustomized(folder: Path, components: list[str]) -> list[Resource]:
    overlay = folder / "overlay"
    overlay.mkdir()
    up = Path(*[".."] * len(overlay.resolve().parts[1:]), *SOURCES.resolve().parts[1:])
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [str(up / "base")],
                "components": [str(up / "components" / one) for one in components],
            }
        )
    )
    return built(overlay)


@exhaustive
@with_helm
@pytest.mark.parametrize("name", CASES)
def test_chart_gives_the_objects_of_kustomize(
    name: str, rendered: dict[str, list[Resource]], tmp_path: Path
) -> None:
    theirs = indexed(kustomized(tmp_path, CASES[name]))
    del theirs["Namespace", "wattspan"]  # Helm needs it before it installs
    assert indexed(rendered[name]) == theirs


@exhaustive
@with_helm
@pytest.mark.parametrize("name", CASES)
def test_objects_of_the_chart_match_the_kubernetes_schema(
    name: str, rendered: dict[str, list[Resource]]
) -> None:
    # Resources of the Prometheus operator are not part of Kubernetes.
    own = [one for one in rendered[name] if not one["apiVersion"].startswith("monitoring.coreos")]
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    for one, version in itertools.product(own, [oldest.removeprefix(">=")[:4], "1.37"]):
        kubernetes_validate.validate(one, version, strict=True)
    assert {"DaemonSet", "ConfigMap", "NetworkPolicy"} <= {one["kind"] for one in own}


@exhaustive
@with_helm
def test_values_change_the_objects_that_they_name() -> None:
    values = {
        **chosen("gpu", "capper", "resource-slices", "cpu-counters", "podmonitor"),
        "image": {"repository": "registry.example.org:5000/wattspan", "tag": "1.2"},
        "imagePullSecrets": [{"name": "registry"}],
        "config": "[spans]\nhttp = ''\n",
        "args": ["--set=fleet.place=row-2"],
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "affinity": {"nodeAffinity": {}},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "supplementalGroups": [990],
        "podAnnotations": {"example.org/owner": "energy"},
        "resources": {"capper": {"limits": {"cpu": "1", "memory": "64Mi"}}},
        "monitoringNamespace": "observability",
        "podMonitor": {"labels": {"release": "prometheus"}, "interval": "1m"},
    }
    results, _ = helm({"changed": ("energy", values), "same": ("energy", {})})
    found = {one["kind"]: one for one in objects(results["changed"])}
    daemons = found["DaemonSet"]["spec"]["template"]
    pod = daemons["spec"]
    images = {one["image"] for one in [*pod["containers"], *pod["initContainers"]]}
    assert images == {"registry.example.org:5000/wattspan:1.2"}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert found["ConfigMap"]["data"] == {"config.toml": values["config"]}
    plain = {one["kind"]: one for one in objects(results["same"])}
    assert found["ConfigMap"]["metadata"]["name"] != plain["ConfigMap"]["metadata"]["name"]
    (volume,) = (one for one in pod["volumes"] if "configMap" in one)
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    agent, capper = pod["containers"]
    assert agent["args"] == ["run", "--set=fleet.place=row-2"]
    assert capper["resources"]["limits"]["memory"] == "64Mi"
    assert agent["resources"]["limits"]["memory"] == "256Mi"
    selected = {"kubernetes.io/os": "linux", "nvidia.com/gpu.present": "true"}
    assert pod["nodeSelector"] == selected
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["tolerations"] == values["tolerations"]
    assert pod["securityContext"]["supplementalGroups"] == [990]
    assert daemons["metadata"]["annotations"].keys() >= {"example.org/owner", "prometheus.io/port"}
    (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
    (source,) = rule["from"]
    names = source["namespaceSelector"]["matchLabels"]
    assert names == {"kubernetes.io/metadata.name": "observability"}
    monitor = found["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["podMetricsEndpoints"][0]["interval"] == "1m"
    assert {
        one["metadata"]["namespace"] for one in found.values() if "Cluster" not in one["kind"]
    } == {"energy"}


@exhaustive
@with_helm
def test_releases_in_two_namespaces_share_no_object() -> None:
    values = chosen("cpu-counters", "resource-slices")
    results, _ = helm({name: (name, values) for name in ("gpu-nodes", "cpu-nodes")})
    keys = [
        {(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in found}
        for found in map(objects, results.values())
    ]
    assert keys[0] & keys[1] == set()
    for name, one in results.items():
        (binding,) = (r for r in objects(one) if r["kind"] == "ClusterRoleBinding")
        assert binding["subjects"][0]["namespace"] == name
        assert binding["roleRef"]["name"] == binding["metadata"]["name"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "flag as text": ({"components": {"gpu": "yes"}}, "gpu"),
    "unknown component": (chosen("gpus"), "gpus"),
    "unknown value": ({"imagee": {}}, "imagee"),
    "number as tag": ({"image": {"tag": 1.2}}, "tag"),
    "image with a command": ({"image": {"repository": "a b; c"}}, "repository"),
    "group 0": ({"supplementalGroups": [0]}, "supplementalGroups"),
    "capper without gpu": (chosen("capper"), "gpu"),
    "fleet without capper": (chosen("fleet", "gpu"), "capper"),
    "slices without root": (chosen("resource-slices"), "cpu-counters"),
    "interval without unit": ({"podMonitor": {"interval": "15"}}, "interval"),
    "configuration as table": ({"config": {"spans": {}}}, "config"),
}


@exhaustive
@with_helm
def test_wrong_values_are_refused_by_name() -> None:
    results, _ = helm({name: ("wattspan", values) for name, (values, _) in WRONG.items()})
    for name, (_, named) in WRONG.items():
        assert isinstance(results[name], str), f"{name} is accepted"
        assert named in results[name], name


@exhaustive
@with_helm
def test_linter_has_no_warning() -> None:
    _, findings = helm({})
    assert [one for one in findings["messages"] if one["severity"] > 1] == []
    assert findings["errors"] == []


@exhaustive
@with_helm
def test_notes_name_what_the_pods_wait_for() -> None:
    results, _ = helm({name: ("energy", chosen(*found)) for name, found in CASES.items()})
    for name, one in results.items():
        notes = one["wattspan/templates/NOTES.txt"]
        secrets = set(re.findall(r"secretName: (\S+)", one["wattspan/templates/wattspan.yaml"]))
        assert set(re.findall(r"-n energy create secret generic (\S+)", notes)) == secrets, name
        assert "label namespace energy" in notes


@exhaustive
@with_helm
def test_packaged_chart_gives_the_same_objects(tmp_path: Path) -> None:
    """An archive has files in place of the link."""
    archive = tmp_path / "wattspan.tgz"
    with tarfile.open(archive, "w:gz", dereference=True) as packed:
        packed.add(CHART, "wattspan")
    case: dict[str, Case] = {"one": ("wattspan", chosen("gpu", "cpu-counters", "capper"))}
    assert helm(case, archive)[0] == helm(case)[0]
