"""Groups of processes by ``/proc`` and cgroup layouts that others recorded.

A file has ``[[process]]`` tables: ``comm``, ``command`` (the arguments), ``cgroup`` and ``uid``,
and the expected ``groups`` by kind. No cgroup hierarchy is visible.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.model import GroupKind
from wattspan.processes.metadata import HostProcesses
from wattspan.processes.procfs import ProcFs

pytestmark = pytest.mark.needs_root  # processes of other users

_STAT = "{pid} ({comm}) S 1 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 42 0 0"


@pytest.mark.parametrize("case", field_cases("proc"))
def test_processes_belong_to_their_groups(case: FieldCase, tmp_path: Path) -> None:
    directory = HostProcesses(ProcFs(tmp_path))
    for pid, process in enumerate(case["process"], 100):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(_STAT.format(pid=pid, comm=process["comm"]))
        (folder / "cmdline").write_bytes("\0".join([*process["command"], ""]).encode())
        (folder / "cgroup").write_text(process["cgroup"])
        os.chown(folder, process["uid"], process["uid"])
        consumer = directory.identify(pid)
        assert consumer is not None
        info = directory.describe(consumer)
        assert info is not None
        named = {group.kind.value: group.name for group in info.groups}
        named.pop(GroupKind.USER.value)
        assert named == process["groups"], process["command"]
