"""The manifests in packaging/kubernetes are valid, consistent, and minimal in permissions."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from testbed.kustomize import Resource, built, documents, kustomization, of_kind, parsed
from testbed.requirements import ROOT

from wattspan.cli import cli
from wattspan.processes.claimed_gpus import ACCOUNT, DIRECTORIES
from wattspan.processes.performance_counters import SOCKET_PATH
from wattspan.processes.pod_resources import SOCKET

pytestmark = pytest.mark.slow

FOLDER = ROOT / "packaging" / "kubernetes"
GUIDE = ROOT / "docs" / "how-to" / "run-on-kubernetes.md"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
OVERLAYS = {
    "base": FOLDER / "base",
    **{path.name: path for path in sorted((FOLDER / "overlays").iterdir())},
}
UID = 59949
BLOCKS = re.findall(
    r"^```yaml\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
PATCHES = [text for text in BLOCKS if text.startswith("patches:")]
DEPLOYED = {
    path: text
    for text in BLOCKS
    for path in re.findall(r"^# (deploy/\w+)/kustomization.yaml$", text, re.MULTILINE)
}
"""Whole kustomizations of the guide, by the folders they are for."""
NAMES = [
    *OVERLAYS,
    *(f"with {name}" for name in COMPONENTS),
    *DEPLOYED,
    *(f"patch {number}" for number in range(len(PATCHES))),
]


@pytest.fixture(params=NAMES, scope="module")
def resources(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Resource]:
    """Result of each overlay, of each component on the base, and of each example of the guide."""
    return built(chosen(request.param, tmp_path_factory.mktemp("chosen")))


def chosen(name: str, tmp_path: Path) -> Path:
    if name in OVERLAYS:
        return OVERLAYS[name]
    if name in DEPLOYED:
        shutil.copytree(FOLDER, tmp_path / "packaging" / "kubernetes", dirs_exist_ok=True)
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "kustomization.yaml").write_text(DEPLOYED[name])
        return tmp_path / name
    kind, _, what = name.partition(" ")
    components = [what] if kind == "with" else []
    patches = yaml.safe_load(PATCHES[int(what)])["patches"] if kind == "patch" else []
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    # path of the tree relative to the overlay: kustomize takes no other.
    here = Path(*[".."] * len(overlay.resolve().parts[1:]), *FOLDER.resolve().parts[1:])
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [str(here / "base")],
                "components": [str(here / "components" / one) for one in components],
                "patches": patches,
            }
        )
    )
    return overlay


def pod_of(resources: list[Resource]) -> Resource:
    (daemons,) = of_kind(resources, "DaemonSet")
    return dict(daemons["spec"]["template"]["spec"])


def containers(resources: list[Resource]) -> dict[str, Resource]:
    return {one["name"]: one for one in pod_of(resources)["containers"]}


# ------------------------------------------------------------------------------------ validity


@pytest.mark.exhaustive
def test_resources_match_the_kubernetes_schema(resources: list[Resource]) -> None:
    # resources of the Prometheus operator are not part of Kubernetes
    own = [one for one in resources if not one["apiVersion"].startswith("monitoring.coreos.com/")]
    assert [str(fault) for one in own if (fault := fault_of(one))] == []


def fault_of(resource: Resource) -> Exception | None:
    try:
        kubernetes_validate.validate(resource, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return error
    return None


def test_schema_check_detects_errors() -> None:
    resource = next(of_kind(built(FOLDER / "base"), "DaemonSet"))
    resource["spec"]["template"]["spec"]["hostPid"] = True
    assert "hostPid" in str(fault_of(resource))


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("kustomization.yaml")), ids=str)
def test_kustomization_lists_exactly_the_files(path: Path) -> None:
    folder, said = path.parent, kustomization(path.parent)
    files = [name for one in said.get("configMapGenerator", ()) for name in one["files"]]
    named = [*said.get("resources", ()), *said.get("components", ()), *files]
    assert [name for name in named if not (folder / name).exists()] == []
    assert {p.name for p in folder.iterdir()} - {"kustomization.yaml"} <= set(named)


@pytest.mark.parametrize("name", NAMES)
def test_kustomize_gives_the_same_result(name: str, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl to ask; packaging/kubernetes was resolved by the tests' own means")
    folder = chosen(name, tmp_path)
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = re.sub(r"\b(wattspan(-gpu)?)-[0-9a-z]{10}$", r"\1", done.stdout, flags=re.MULTILINE)
    theirs = {(one["kind"], one["metadata"]["name"]): one for one in parsed(text)}
    assert theirs == {(one["kind"], one["metadata"]["name"]): one for one in built(folder)}


# -------------------------------------------------------------------------------- its own accord


def test_selectors_ports_and_volumes_resolve(resources: list[Resource]) -> None:
    (daemons,) = of_kind(resources, "DaemonSet")
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    services = list(of_kind(resources, "Service"))
    (policy,) = of_kind(resources, "NetworkPolicy")
    monitors = [m["spec"]["selector"]["matchLabels"] for m in of_kind(resources, "PodMonitor")]
    for selector in (
        daemons["spec"]["selector"]["matchLabels"],
        *(service["spec"]["selector"] for service in services),
        policy["spec"]["podSelector"]["matchLabels"],
        *monitors,
    ):
        assert selector.items() <= labels.items()
    pod = pod_of(resources)
    ports = {p["name"] for c in pod["containers"] for p in c.get("ports", ())}
    opened = {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]}
    assert {p["targetPort"] for one in services for p in one["spec"]["ports"]} == ports == opened
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
    assert mounted == volumes
    maps = {one["metadata"]["name"] for one in of_kind(resources, "ConfigMap")}
    assert {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v} == maps


def test_every_object_belongs_to_the_namespace(resources: list[Resource]) -> None:
    clustered = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
    placed = {
        (one["kind"], one["metadata"]["name"]): one["metadata"].get("namespace")
        for one in resources
        if one["kind"] not in clustered
    }
    assert set(placed.values()) == {"wattspan"}, placed
    assert {one["metadata"]["labels"]["app.kubernetes.io/part-of"] for one in resources} == {
        "wattspan"
    }


def test_image_is_of_this_version(resources: list[Resource]) -> None:
    assert {one["image"] for one in containers(resources).values()} == {f"wattspan:{VERSION}"}


def test_config_map_is_a_valid_configuration(resources: list[Resource], tmp_path: Path) -> None:
    (made,) = of_kind(resources, "ConfigMap")
    path, token = tmp_path / "config.toml", tmp_path / "token"
    path.write_text(made["data"]["config.toml"])
    token.write_text("0123456789abcdef\n")
    token.chmod(0o440)  # as the secret is mounted
    settings = [
        argument.replace("/etc/wattspan-token/token", str(token))
        for argument in containers(resources)["agent"]["args"]
        if argument.startswith("--set")
    ]
    done = CliRunner().invoke(cli, ["config", "check", str(path), *settings])
    assert done.exit_code == 0, done.output
    table = tomllib.loads(path.read_text())
    port, *_ = containers(resources)["agent"]["ports"]
    assert table["exporters"]["prometheus"]["listen"] == f":{port['containerPort']}"
    mounts = {m["mountPath"] for m in containers(resources)["agent"]["volumeMounts"]}
    assert table["sources"]["rapl"]["sysfs"] in mounts
    assert table["caps"]["users"] == [str(UID)]


def test_commands_are_those_of_the_program(resources: list[Resource]) -> None:
    for container in containers(resources).values():
        command, *flags = container["args"]
        known = CliRunner().invoke(cli, [command, "--help"]).output
        assert [flag for flag in flags if flag.partition("=")[0] not in known] == []


def test_pod_monitor_sends_the_required_token(tmp_path: Path) -> None:
    made = built(chosen("with podmonitor-token", tmp_path))
    (monitor,) = of_kind(made, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    shown = endpoint["authorization"]["credentials"]
    (secret,) = (v["secret"]["secretName"] for v in pod_of(made)["volumes"] if "secret" in v)
    (asked,) = (arg for arg in containers(made)["agent"]["args"] if "token_file" in arg)
    assert shown == {"name": secret, "key": asked.rpartition("/")[2]}
    assert f"create secret generic {secret} --from-file={shown['key']}=" in GUIDE.read_text("utf-8")


def test_fleet_of_the_guide_has_its_files_and_its_names(tmp_path: Path) -> None:
    made = built(chosen("deploy/fleet", tmp_path))
    agent, capper = (containers(made)[name] for name in ("agent", "capper"))
    guide = GUIDE.read_text("utf-8")
    (added,) = re.findall(r"^```toml\n(\[fleet\].*?)^```$", guide, re.MULTILINE | re.DOTALL)
    path = tmp_path / "config.toml"
    (configured,) = of_kind(made, "ConfigMap")
    path.write_text(f"{configured['data']['config.toml']}\n{added}")
    done = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert done.exit_code == 0, done.output
    fleet = tomllib.loads(path.read_text())["fleet"]
    (secret,) = (v["secret"] for v in pod_of(made)["volumes"] if v["name"] == "fleet")
    (mount,) = (m for m in agent["volumeMounts"] if m["name"] == "fleet")
    files = {Path(fleet["password_file"]), Path(fleet["tls_ca"])}
    assert {file.parent for file in files} == {Path(mount["mountPath"])}
    sources = " ".join(sorted(f"--from-file={file.name}" for file in files))
    command = f"create secret generic {secret['secretName']} {sources}"
    assert command in guide
    assert command in (FOLDER / "components/fleet/kustomization.yaml").read_text()
    assert secret["defaultMode"] == 0o440  # passwords that others can read are refused
    assert "fleet" not in {m["name"] for m in capper["volumeMounts"]}
    names = {one["name"]: one.get("valueFrom", {}) for one in agent["env"]}
    assert names["WATTSPAN_FLEET_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert names.keys() >= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}


def test_nodes_of_a_mixed_cluster_match_one_daemon_set(tmp_path: Path) -> None:
    gpu, cpu = (
        next(of_kind(built(chosen(f"deploy/{kind}", tmp_path)), "DaemonSet"))["spec"]
        for kind in ("gpu", "cpu")
    )
    label = "nvidia.com/gpu.present"
    there, away = (one["template"]["spec"] for one in (gpu, cpu))
    assert there["nodeSelector"][label] == "true"
    (term,) = away["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"] == [{"key": label, "operator": "NotIn", "values": ["true"]}]
    assert (there["runtimeClassName"], away.get("runtimeClassName")) == ("nvidia", None)
    for one, other in ((gpu, cpu), (cpu, gpu)):
        chosen_by = one["selector"]["matchLabels"].items()
        assert chosen_by <= one["template"]["metadata"]["labels"].items()
        assert not chosen_by <= other["template"]["metadata"]["labels"].items()


# ------------------------------------------------------------------------------- permissions

DEVIATIONS = {
    "base": {"hostPID", "hostPath"},
    "cpu": {"hostPID", "hostPath", "root"},
    "gpu": {"hostPID", "hostPath", "root"},
    "capper": {"hostPID", "hostPath", "root", "SYS_ADMIN"},
}
"""Exceptions to the Pod Security Standard "restricted", by overlay."""


def deviations(pod: Resource) -> set[str]:
    """Every way in which a pod is beyond "restricted" (baseline is part of it)."""
    return set(_of_pod(pod)) | {
        found
        for one in [*pod["containers"], *pod.get("initContainers", ())]
        for found in _of_container(one, pod.get("securityContext", {}))
    }


def _of_pod(pod: Resource) -> Iterator[str]:
    yield from (name for name in ("hostPID", "hostIPC", "hostNetwork") if pod.get(name))
    allowed = {"configMap", "emptyDir", "secret", "projected", "downwardAPI", "csi", "ephemeral"}
    for volume in pod["volumes"]:
        yield from set(volume) - {"name", "persistentVolumeClaim"} - allowed
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _of_container(container: Resource, pod: Resource) -> Iterator[str]:
    own: dict[str, Any] = {**pod, **container.get("securityContext", {})}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if own.get("runAsNonRoot") is not True or own.get("runAsUser") == 0:
        yield "root"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities"
    yield from set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}
    if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccomp"
    if own.get("procMount", "Default") != "Default":
        yield "procMount"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"


@pytest.mark.parametrize("name", OVERLAYS)
def test_pod_security_exceptions_are_the_listed_ones(name: str) -> None:
    assert deviations(pod_of(built(OVERLAYS[name]))) == DEVIATIONS[name]


@pytest.mark.parametrize("name", OVERLAYS)
def test_guide_lists_these_deviations(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|.*$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert DEVIATIONS[name] == set(re.findall(r"\*(\w+)\*", row))


def test_every_container_can_write_only_to_its_volumes(resources: list[Resource]) -> None:
    for container in containers(resources).values():
        assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_host_paths_are_read_only_except_the_journal(
    resources: list[Resource],
) -> None:
    hosts = {
        v["name"]: v["hostPath"]["path"] for v in pod_of(resources)["volumes"] if "hostPath" in v
    }
    written = {
        (name, hosts[mount["name"]])
        for name, container in containers(resources).items()
        for mount in container["volumeMounts"]
        if mount["name"] in hosts and not mount.get("readOnly")
    }
    assert written <= {("capper", "/var/lib/wattspan-capper")}


def test_pods_have_no_api_access(resources: list[Resource]) -> None:
    (account,) = of_kind(resources, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert pod_of(resources)["automountServiceAccountToken"] is False
    volumes = {volume["name"] for volume in pod_of(resources)["volumes"]}
    asks = "service-account" in volumes
    assert bool([one for one in resources if "Role" in one["kind"]]) is asks
    (policy,) = of_kind(resources, "NetworkPolicy")
    opened = {
        (
            rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            if "to" in rule
            else "",
            p["port"],
        )
        for rule in policy["spec"]["egress"]
        for p in rule["ports"]
    }
    expected = {("etcd", 2379), ("kube-system", 53)} if "fleet" in volumes else set()
    assert opened == expected | ({("", 443), ("", 6443)} if asks else set())


def test_resource_slices_grant_the_agent_one_right(tmp_path: Path) -> None:
    made = built(chosen("with resource-slices", tmp_path))
    (role,) = of_kind(made, "ClusterRole")
    (binding,) = of_kind(made, "ClusterRoleBinding")
    (account,) = of_kind(made, "ServiceAccount")
    assert role["rules"] == [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    names = {key: account["metadata"][key] for key in ("name", "namespace")}
    assert binding["subjects"] == [{"kind": "ServiceAccount", **names}]
    agent = containers(made)["agent"]
    paths = {mount["mountPath"] for mount in agent["volumeMounts"]}
    assert {str(ACCOUNT), str(SOCKET.parent), *map(str, DIRECTORIES)} <= paths
    environment = {one["name"]: one.get("valueFrom") for one in agent["env"]}
    assert environment["WATTSPAN_PROCESSES_KUBERNETES_NODE"] == {
        "fieldRef": {"fieldPath": "spec.nodeName"}
    }
    done = CliRunner().invoke(
        cli, ["config", "show"], env={"WATTSPAN_PROCESSES_KUBERNETES_NODE": "node-1"}
    )
    assert 'kubernetes_node = "node-1"' in done.output


def test_containers_have_limits_and_liveness_probes(resources: list[Resource]) -> None:
    for container in containers(resources).values():
        assert container["resources"]["limits"].keys() == {"cpu", "memory"}
        assert "livenessProbe" in container


def test_agent_cannot_write_to_the_capper_socket_directory() -> None:
    agent, capper = (containers(built(OVERLAYS["capper"]))[name] for name in ("agent", "capper"))
    where = {
        name: next(m for m in one["volumeMounts"] if m["mountPath"] == "/run/wattspan-capper")
        for name, one in (("agent", agent), ("capper", capper))
    }
    assert where["agent"]["name"] == where["capper"]["name"]
    assert where["agent"]["readOnly"] is True
    own = {m["name"] for m in capper["volumeMounts"]}
    shared = own & {m["name"] for m in agent["volumeMounts"]}
    assert shared == {"config", "capper-run"}


def test_helper_of_counters_has_two_capabilities_and_shares_one_directory(tmp_path: Path) -> None:
    made = built(chosen("with performance-counters", tmp_path))
    agent, helper = (containers(made)[name] for name in ("agent", "counters"))
    assert deviations(pod_of(made)) == DEVIATIONS["base"] | {"root", "BPF", "PERFMON"}
    assert helper["args"] == ["counters", f"--listen={SOCKET_PATH}"]
    (mount,) = helper["volumeMounts"]
    assert mount["mountPath"] == str(SOCKET_PATH.parent)
    assert {**mount, "readOnly": True} in agent["volumeMounts"]
    assert "ports" not in helper
    (policy,) = of_kind(made, "NetworkPolicy")
    assert policy["spec"]["egress"] == []


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda p: p.name)
def test_manifests_hold_no_secret(path: Path) -> None:
    assert "Secret" not in {one["kind"] for one in documents(path)}
