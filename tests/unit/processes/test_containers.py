"""Container, pod, job and unit are read from the cgroup paths that runtimes really write."""

import pytest

from wattspan.model import Group, GroupKind
from wattspan.processes.cgroup_names import MAX_DEPTH, container_ids, names_of
from wattspan.util.text import MAX_LABEL, clean_label

ID = "3f4d8c2b9a1e7f60518273645566778899aabbccddeeff00112233445566778a"
POD = "0a1b2c3d-1111-2222-3333-444455556666"
POD_ = POD.replace("-", "_")
SHORT = ID[:12]
OUTER = "a" * 64


def container(name: str = SHORT) -> tuple[GroupKind, str]:
    return GroupKind.CONTAINER, name


POD_GROUP = (GroupKind.POD, POD)

PATHS = {
    "docker, cgroupfs": (f"4:memory:/docker/{ID}", [container()]),
    "containerd, nerdctl": (f"0::/system.slice/nerdctl-{ID}.scope", [container()]),
    "containerd, bare": (f"0::/default/{ID}", [container()]),
    "kubernetes, containerd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD_}.slice/cri-containerd-{ID}.scope",
        [container(), POD_GROUP]),
    "kubernetes, CRI-O": (
        f"0::/kubepods.slice/x.slice/kubepods-besteffort-pod{POD_}.slice/crio-{ID}.scope",
        [container(), POD_GROUP]),
    "kubernetes, cgroupfs": (
        f"9:cpuacct:/kubepods/besteffort/pod{POD}/{ID}", [container(), POD_GROUP]),
    "kubernetes in kind": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        f"kubelet-kubepods-besteffort-pod{POD_}.slice/cri-containerd-{ID}.scope",
        [container(), POD_GROUP]),
    "kubernetes, cgroupfs below another root": (
        f"0::/site-kubepods/burstable/pod{POD}/{ID}", [container(), POD_GROUP]),
    "a pod's name below another directory": (
        f"0::/notkubepods/burstable/pod{POD}/{ID}", [container()]),
    "the pod itself": (f"0::/kubepods.slice/kubepods-pod{POD_}.slice", [POD_GROUP]),
    "podman, root": (f"0::/machine.slice/libpod-{ID}.scope/container", [container()]),
    "podman, rootless": (
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
        [container(), (GroupKind.UNIT, "user@1000.service")]),
    "unit": ("0::/system.slice/ssh.service", [(GroupKind.UNIT, "ssh.service")]),
    "template with escapes": (
        "0::/system.slice/system-getty.slice/my\\x2dgetty@tty\\x2fS0.service",
        [(GroupKind.UNIT, "my-getty@tty/S0.service")]),
    "escaped umlaut": (
        "0::/system.slice/m\\xc3\\xbcll.service", [(GroupKind.UNIT, "müll.service")]),
    "user unit": (
        "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-firefox-42.scope",
        [(GroupKind.UNIT, "app-gnome-firefox-42.scope")]),
    "unit with a cgroup below": (
        "0::/system.slice/foo.service/worker/1", [(GroupKind.UNIT, "foo.service")]),
    "init": ("0::/init.scope", [(GroupKind.UNIT, "init.scope")]),
    "a container in a job": (
        f"0::/system.slice/slurmstepd.scope/job_7/step_0/{ID}",
        [container(), (GroupKind.JOB, "7"), (GroupKind.UNIT, "slurmstepd.scope")]),
    "lxc v1": ("3:cpu:/lxc/web/init.scope", [container("web"), (GroupKind.UNIT, "web/init.scope")]),
    "lxc v2": ("0::/lxc.payload.web/system.slice/nginx.service",
        [container("web"), (GroupKind.UNIT, "web/nginx.service")]),
    "bare": ("0::/mine/own", [(GroupKind.CGROUP, "/mine/own")]),
    "root": ("0::/", []),
    "empty": ("", []),
    "outside": ("0::/../../etc/passwd", [(GroupKind.CGROUP, "/../../etc/passwd")]),
    "not hexadecimal": (f"0::/docker/{'g' * 64}", [(GroupKind.CGROUP, f"/docker/{'g' * 64}")]),
    "nonsense": ("what is this?", []),
    "a line cut short": ("0:", []),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PATHS.values(), ids=PATHS.keys())
def test_groups_of_a_path(text: str, expected: list[tuple[GroupKind, str]]) -> None:
    assert [tuple(group) for group in names_of(text).groups] == expected


def test_hybrid_host_reads_every_cgroup_hierarchy() -> None:
    text = f"12:cpuacct:/docker/{ID}\n1:name=systemd:/system.slice/docker.service\n0::/\n"
    assert names_of(text).groups == (
        Group(GroupKind.CONTAINER, SHORT),
        Group(GroupKind.UNIT, "docker.service"),
    )


def test_path_with_line_breaks_cannot_forge_a_hierarchy() -> None:
    text = "0::/evil\nname\x1b[31m\n"
    (group,) = names_of(text).groups
    assert group == Group(GroupKind.CGROUP, "/evil?name?[31m")


def test_very_long_path_keeps_both_ends() -> None:
    (group,) = names_of("0::/begin" + "x" * 5000 + "end").groups
    assert len(group.name) == MAX_LABEL
    assert group.name.startswith("/begin")
    assert group.name.endswith("end")


def test_clean_text_is_unchanged() -> None:
    assert clean_label("naïve-Größe", 64) == "naïve-Größe"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"0::/docker/{OUTER}/docker/{ID}\n", {OUTER, ID}),
        (f"2:cpu:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n", {ID}),
        (f"0::/../../kubepods/burstable/pod{POD}/{ID}\n", {ID}),
        (f"0::/ecs/{'ab' * 16}/{'ab' * 16}-1234567890\n", {f"{'ab' * 16}-1234567890"}),
        (f"0::/machine.slice/libpod-conmon-{ID}.scope\n", set()),
        (f"0::/system.slice/{ID}.service\n", set()),
        (f"0::/system.slice/var-lib-docker-overlay2-{ID}-merged.mount\n", set()),
        ("", set()),
    ],
)
def test_containers_of_a_process_are_whole_directories(text: str, expected: set[str]) -> None:
    assert container_ids(text) == expected


def test_directory_deeper_than_any_manager_nests_names_nothing() -> None:
    above = "/deep" * (MAX_DEPTH - 1)
    named, deeper = f"0::{above}/docker-{ID}.scope", f"0::{above}/deep/docker-{ID}.scope"
    assert (container_ids(named), names_of(named).container) == ({ID}, ID)
    assert (container_ids(deeper), names_of(deeper).container) == (frozenset(), "")
