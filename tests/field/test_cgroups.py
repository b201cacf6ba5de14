"""Groups and principals of processes in cgroup layouts that others wrote.

A file has ``[[process]]`` tables: ``cgroup`` is the text of its ``/proc/PID/cgroup``, ``uid`` its
user, ``groups`` the expected names by kind, and ``principal`` the expected one, if it matters.
``[directories]`` names directories that root does not own (``owners``), their ``modes``, and
``hidden`` hierarchies; ``[[daemon]]`` lists further processes: ``pid``, ``uid``, ``comm``,
``command`` and the directory that they are in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.model import GroupKind, Principal
from wattspan.processes.cgroup_names import SlurmJobs, cgroup_paths
from wattspan.processes.principals import CgroupDirectories, PrincipalResolver, SubordinateUsers
from wattspan.processes.procfs import ProcFs

pytestmark = pytest.mark.needs_root  # directories of other users

_STAT = "{pid} ({comm}) S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 42 0 0"


def build_cgroups(case: FieldCase, root: Path) -> CgroupDirectories:
    """The hierarchies of the processes below ``root``, with the owners of the case."""
    listed = case.get("directories", {})
    for process in case["process"]:
        for controllers, path in cgroup_paths(process["cgroup"]).items():
            if not listed.get("hidden") and ".." not in path.split("/"):
                mount = root / controllers.removeprefix("name=")
                (mount / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
                (mount / ("cgroup.procs" if controllers else "cgroup.controllers")).touch()
    for path, owner in listed.get("owners", {}).items():
        os.chown(root / path.lstrip("/"), owner, owner)
    for path, mode in listed.get("modes", {}).items():
        (root / path.lstrip("/")).chmod(int(mode, 8))
    return CgroupDirectories(root)


def build_daemons(case: FieldCase, cgroups: Path, proc: Path) -> ProcFs:
    for one in case.get("daemon", ()):
        folder = proc / str(one["pid"])
        folder.mkdir(parents=True)
        (folder / "stat").write_text(_STAT.format(**one))
        (folder / "cmdline").write_text(one["command"] + "\0")
        os.chown(folder, one["uid"], one["uid"])
        directory = cgroups / one["directory"].lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "cgroup.procs").open("a") as file:
            file.write(f"{one['pid']}\n")
    return ProcFs(proc)


@pytest.mark.parametrize("case", field_cases("cgroups"))
def test_processes_belong_to_their_groups(case: FieldCase, tmp_path: Path) -> None:
    cgroups, subuid = tmp_path / "cgroup", tmp_path / "subuid"
    cgroups.mkdir()
    subuid.write_text(case.get("subuid", ""))
    directories = build_cgroups(case, cgroups)
    daemons = build_daemons(case, cgroups, tmp_path / "proc")
    resolver = PrincipalResolver(directories, SubordinateUsers(subuid), SlurmJobs(daemons))
    for process in case["process"]:
        groups, principal = resolver.describe(process["cgroup"], process.get("uid", 0))
        named = {group.kind.value: group.name for group in groups}
        named.pop(GroupKind.USER.value)
        assert named == process["groups"], process["cgroup"]
        if "principal" in process:
            assert principal == _principal(process["principal"]), process["cgroup"]


def _principal(table: dict[str, Any]) -> Principal | None:
    return Principal(table.get("user"), table.get("container", ""), table.get("pod", ""))
