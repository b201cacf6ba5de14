"""No file that an operator names blocks the program: named pipes, devices, sockets, directories."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from testbed.certificates import Authority
from testbed.program import UNPRIVILEGED, in_process, options, wattspan

from wattspan.footprint.price_and_carbon import NumberError, read_number
from wattspan.util.files import MAX_FILE_BYTES

Maker = Callable[[Path], Path]


def named_pipe(folder: Path) -> Path:
    os.mkfifo(folder / "it", 0o600)
    return folder / "it"


def bound_socket(folder: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(folder / "it"))
    return folder / "it"


def directory(folder: Path) -> Path:
    (folder / "it").mkdir()
    return folder / "it"


def endless(_: Path) -> Path:
    return Path("/dev/zero")


def large(folder: Path) -> Path:
    with (folder / "it").open("wb") as file:
        file.truncate(17 * MAX_FILE_BYTES)  # sparse
    (folder / "it").chmod(0o600)
    return folder / "it"


KINDS = {
    "a named pipe": named_pipe,
    "a socket": bound_socket,
    "is a directory": directory,
    "a device": endless,
    "larger than": large,
}
kinds = pytest.mark.parametrize(("said", "make"), KINDS.items(), ids=KINDS.keys())


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A read that blocks is interrupted after 20 s."""

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail("a read blocks")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(*words: str) -> str:
    """Standard error of `config check`."""
    done = in_process("config", "check", *words)
    assert done.returncode == 2, (done.stdout, done.stderr)
    return done.stderr


@kinds
def test_configuration_of_another_kind_is_refused(said: str, make: Maker, tmp_path: Path) -> None:
    path = make(tmp_path)
    told = check("--config", str(path))
    assert f"Cannot read {path}: " in told
    assert said in told
    assert told.rstrip().endswith("Name the configuration, or copy it into a file.")


@pytest.mark.parametrize("words", [("--config",), ()])
def test_unreadable_configuration_has_the_remedy(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.touch(mode=0)
    done = wattspan("config", "check", *words, str(path), within=UNPRIVILEGED)
    assert done.returncode == 2
    assert "Make it readable for the user that runs wattspan." in done.stderr


@kinds
def test_files_of_another_kind_that_the_configuration_names_are_refused(
    said: str, make: Maker, tmp_path: Path
) -> None:
    (tmp_path / "pki").mkdir()
    issued = Authority(tmp_path / "pki").issue("server")
    (tmp_path / "odd").mkdir()
    path = make(tmp_path / "odd")
    metrics = "exporters.prometheus"
    told = check(*options({f"{metrics}.token_file": path, "cost.schedule": path}))
    assert told.count(f"Cannot read {path}: ") == 2, told
    assert told.count(said) == 2, told
    for name in ("tls_certificate", "tls_key", "tls_client_ca"):
        tls = {"tls_certificate": issued.certificate, "tls_key": issued.key} | {name: path}
        told = check(*options({f"{metrics}.{key}": value for key, value in tls.items()}))
        assert f"Cannot read {path}: " in told
        assert said in told
        assert name in told


@kinds
def test_files_of_another_kind_for_the_collector_are_refused(
    said: str, make: Maker, tmp_path: Path
) -> None:
    path = make(tmp_path)
    for name in ("headers_file", "tls_ca"):
        endpoint = {"exporters.otlp.endpoint": "https://127.0.0.1:4318"}
        told = check(*options(endpoint | {f"exporters.otlp.{name}": str(path)}))
        assert f"Cannot read {path}: " in told
        assert said in told
        assert name in told


@kinds
def test_intensity_file_of_another_kind_is_refused(said: str, make: Maker, tmp_path: Path) -> None:
    with pytest.raises(NumberError, match=said):
        read_number(make(tmp_path), 0)
