"""Instructions to an operator for starting the capper."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.capper.protocol import (
    SOCKET_UNIT,
    CapperClient,
    capper_start_command,
    has_capper_unit,
)
from wattspan.installation import files
from wattspan.ports import CapsError
from wattspan.testing import ManualClock


def with_unit(root: Path, place: str = "usr/lib/systemd/system") -> None:
    (root / place).mkdir(parents=True, exist_ok=True)
    (root / place / SOCKET_UNIT).touch()


@pytest.mark.parametrize("place", ["etc", "run", "usr/lib", "usr/local/lib"])
def test_systemd_unit_is_started_if_installed(place: str, tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert capper_start_command(tmp_path) == "wattspan capper"
    with_unit(tmp_path, f"{place}/systemd/system")
    assert capper_start_command(tmp_path) == "systemctl enable --now wattspan-capper.socket"


def test_unit_is_of_no_use_where_no_systemd_runs(tmp_path: Path) -> None:
    with_unit(tmp_path)
    assert not has_capper_unit(tmp_path)


def test_unit_is_the_one_that_is_shipped() -> None:
    assert files.CAPPER_SOCKET == SOCKET_UNIT
    assert (files.service_files_directory() / SOCKET_UNIT).is_file()


def test_missing_capper_error_names_the_start_command(tmp_path: Path) -> None:
    with_unit(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    client = CapperClient(tmp_path / "none", ManualClock(), who="test", root=tmp_path)
    with pytest.raises(CapsError, match=f"`systemctl enable --now {SOCKET_UNIT}`, as root"):
        client.rows()
