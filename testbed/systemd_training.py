"""A training job on the board of a host that systemd has booted; its spans are for the agent there.

The board is emulated by a process inside the namespace: the driver identifies its clients by pid,
and pids inside differ from those outside. The board determines the time of a step, and its span has
exactly that time, at any load of this machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import emulated_training
from testbed.agent_on_host import Standing
from testbed.capper_process import Gpu
from testbed.nvml_library import ENVIRONMENT
from testbed.systemd_wattspan import PYTHON, Installed
from wattspan.emulation.control import HOST_VARIABLE
from wattspan.emulation.host import profile_named
from wattspan.model import SECOND

PROFILE = "one-socket-h100"
BOARDS = Path("/dev/shm/boards")
TOLD_UNITS = Path("/etc/default/wattspan")

TRAINING = (
    f"{Path(emulated_training.__file__).read_text()}\n"
    + """
import contextlib, http.client, json, os, socket, sys, threading, time

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
RESOURCE = {"attributes": [{"key": "service.name", "value": {"stringValue": "trainer"}}]}
to = http.client.HTTPConnection("localhost")
to.sock = socket.socket(socket.AF_UNIX)
to.sock.connect("/run/wattspan/otlp.sock")
offset = time.time_ns() - time.monotonic_ns()
with EmulatedTraining(step=0.04, noise=0.003) as training:
    print("trains", flush=True)
    while True:
        spans = []
        for _ in range(5):
            began, ended = training.step()
            spans.append({
                "name": "train_step",
                "traceId": os.urandom(16).hex(), "spanId": os.urandom(8).hex(),
                "startTimeUnixNano": str(began + offset), "endTimeUnixNano": str(ended + offset),
            })
        body = {"resourceSpans": [{"resource": RESOURCE, "scopeSpans": [{"spans": spans}]}]}
        with contextlib.suppress(OSError, http.client.HTTPException):  # it works on without agent
            to.request("POST", "/v1/traces", json.dumps(body), {"Content-Type": "application/json"})
            to.getresponse().read()
"""
)


@contextmanager
def board_inside(it: Installed) -> Iterator[Gpu]:
    """From now on the units see the board of an emulated host inside, which is yielded."""
    it.host.run("mkdir", "--mode=0755", BOARDS)
    engine = (PYTHON, "-I", "-m", "wattspan.emulation.engine", PROFILE, BOARDS, str(SECOND))
    with _inside(it, *engine) as first_line:
        assert first_line == "ready\n"
        # like a driver's devices: root may set limits that others may read
        it.host.run("chmod", "0644", BOARDS / "gpus")
        told = it.host.inside(TOLD_UNITS)
        told.write_text(f"{told.read_text()}{ENVIRONMENT}={BOARDS / 'gpus'}\n")
        gpu = Gpu(Standing(it.host.inside(BOARDS), profile_named(PROFILE)))
        yield gpu
        gpu.close()


@contextmanager
def training(it: Installed, program: str = TRAINING) -> Iterator[None]:
    """A job of a service `trainer`, whose spans are `train_step`, works on the board.

    ``program`` prints ``trains`` and ends with its standard input.
    """
    command = f"{HOST_VARIABLE}={BOARDS} exec {PYTHON} -I -c {shlex.quote(program)}"
    with _inside(it, "sh", "-c", command) as first_line:
        assert first_line == "trains\n"
        yield


@contextmanager
def _inside(it: Installed, *command: str | Path) -> Iterator[str]:
    """Run a program that ends with its standard input; yield its first line of output."""
    with it.host.popen(*command) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline()
        finally:
            process.communicate(timeout=60)
