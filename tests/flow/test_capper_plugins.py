"""Hostile plugin packages in the path of the privileged commands: the capper and `caps` import
none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from testbed.capper_fixtures import ORIGINAL, gpu_fixture, host_fixture
from testbed.capper_process import CapperProcess, Gpu
from testbed.program import options, wattspan

from wattspan.emulation.host import EmulatedHost

CAP = 500_000
EXITED = 9

HOSTILE = f"""
import os, pathlib
pathlib.Path(os.environ["MARKER"]).write_text(os.environ.get("COMMAND", "?"))
os._exit({EXITED})
"""

PLUGIN_SETTINGS = """
[sources.hostile]
anything = 1

[exporters.hostile]
anything = "else"

[exporters.prometheus]
listen = "127.0.0.1:0"
"""


class HostilePackage:
    """An installed distribution whose plugins write a marker and end the process at import."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "imported"
        self._site = folder / "site"
        information = self._site / "hostile-1.0.dist-info"
        information.mkdir(parents=True)
        (self._site / "hostile_plugin.py").write_text(HOSTILE)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n"
        )
        (information / "entry_points.txt").write_text(
            "[wattspan.sources]\nhostile = hostile_plugin:plugin\n\n"
            "[wattspan.exporters]\nhostile = hostile_plugin:plugin\n\n"
            "[wattspan.actuators]\nhostile = hostile_plugin:plugin\n"
        )

    @property
    def environ(self) -> dict[str, str]:
        paths = [str(self._site), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MARKER": str(self.marker),
            "WATTSPAN_EXPORTERS_HOSTILE_ANYTHING": "1",
        }


@pytest.fixture
def hostile(tmp_path: Path) -> HostilePackage:
    return HostilePackage(tmp_path)


host = host_fixture("one-socket-h100")
gpu = gpu_fixture()


def test_agents_own_commands_import_an_installed_plugin(hostile: HostilePackage) -> None:
    done = wattspan("config", "check", **hostile.environ)
    assert done.returncode == EXITED
    assert hostile.marker.exists()


def test_capper_and_the_caps_commands_import_no_plugin(
    host: EmulatedHost, gpu: Gpu, hostile: HostilePackage, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(PLUGIN_SETTINGS)
    environ = {**hostile.environ, "WATTSPAN_CONFIG": str(config)}
    plugin_flag = options({"sources.hostile.anything": 2})
    with CapperProcess(host, tmp_path, arguments=plugin_flag, environ=environ) as capper:
        capper.ready()
        client = capper.client()
        client.hold("job", {gpu.key: CAP}, "why")
        places, emulated = [*capper.words[2:], *plugin_flag], capper.words[:2]
        answers = [
            wattspan("caps", "status", *places, **environ),
            wattspan("caps", "accept", *emulated, *places, **environ),
            wattspan("caps", "restore", *emulated, *places, **environ),
        ]
        client.close()
        assert [done.returncode for done in answers] == [0, 0, 0], [a.stderr for a in answers]
        assert "WATTSPAN_EXPORTERS" not in "".join(done.stderr for done in answers)
        assert gpu.limit == ORIGINAL
        assert capper.end() == 0, capper.said
    without_capper = wattspan("caps", "restore", *emulated, *places, **environ)
    assert without_capper.returncode == 0, without_capper.stderr
    assert not hostile.marker.exists()
