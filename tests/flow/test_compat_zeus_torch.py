"""CUDA's indices and windows, and Zeus's optimizer, beside a real PyTorch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from testbed.apps import app_environment
from testbed.requirements import APPS, ROOT
from testbed.tuner.baselines import Selector, sweep
from testbed.tuner.cells import cells
from testbed.tuner.runner import Bench, Terms
from testbed.tuner.zeus_optimizer import on_plants

pytestmark = [pytest.mark.needs_apps, pytest.mark.needs_torch, pytest.mark.exhaustive]

# Both parse CUDA_VISIBLE_DEVICES on a host of four boards. PyTorch's functions are private.
PARSE = """
import json, os, sys
import torch
from wattspan.compat.zeus.devices import CudaEnvironment, visible_boards
from wattspan.sdk.client import Device

uuids = ["GPU-0aaa-1", "GPU-0aab-1", "GPU-7ccc-1", "GPU-9ddd-1"]
boards = [
    Device(f"gpu:{uuid}", "gpu", uuid, None, None, 0.0, "measured", None, i, uuid, "board")
    for i, uuid in enumerate(uuids)
]
found = {}
for text in json.load(sys.stdin):
    os.environ["CUDA_VISIBLE_DEVICES"] = text
    listed = torch.cuda._parse_visible_devices()
    if listed and isinstance(listed[0], str):
        theirs = torch.cuda._transform_uuid_to_ordinals(listed, uuids)
    else:
        beyond = [i for i, number in enumerate(listed) if number >= len(uuids)]
        theirs = listed[: beyond[0] if beyond else None]
    ours = visible_boards(boards, CudaEnvironment(text))
    found[text] = [theirs, [board.number for board in ours]]
print(json.dumps(found))
"""
TEXTS = [
    *("2,0", " 3 , 1 ", "", "-1", "1,-1,2", "0,4,1", "0,x,1", "2x,1", "1,1", "NoDevFiles"),
    *("GPU-9ddd-1", "GPU-7ccc-1,GPU-0aaa-1", "GPU-7,GPU-9d", "GPU-9,GPU-0aa,GPU-7"),
    *("GPU-9,GPU-f,GPU-7", "GPU-9,1", "GPU-9,GPU-9d", "+1,0", "1.5,0", "01,2", "0,,1", ",0"),
    *("GPU-", "gpu-9", "0,GPU-9", "3,2,1,0,9"),
]

WINDOWS = """
import json, warnings
import torch
from wattspan.compat.zeus import ZeusMonitor
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    monitor = ZeusMonitor(gpu_indices=[0])
    for _ in range(3):
        monitor.begin_window("step")
        torch.ones(8).sum()
        step = monitor.end_window("step")
print(json.dumps([[str(one.message) for one in caught], step.time, torch.cuda.is_initialized()]))
"""


def printed(code: str, tmp_path: Path, given: object = None) -> Any:
    done = subprocess.run(
        [str(APPS), "-c", code],
        input=json.dumps(given),
        env={
            **app_environment(),
            "PYTHONPATH": str(ROOT / "agent"),
            "WATTSPAN_RUN_DIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_visible_devices_are_parsed_as_by_pytorch(tmp_path: Path) -> None:
    found = printed(PARSE, tmp_path, TEXTS)
    assert len(found) == len(TEXTS)
    assert {text: ours for text, (_, ours) in found.items()} == {
        text: theirs for text, (theirs, _) in found.items()
    }


def test_pytorch_without_cuda_is_warned_about_once_and_never_initialised(tmp_path: Path) -> None:
    messages, seconds, initialised = printed(WINDOWS, tmp_path)
    construction, first_window = messages
    assert construction.startswith("ZeusMonitor measures nothing yet")
    assert first_window.startswith("Windows do not wait for GPU work through torch: it has no CUDA")
    assert seconds > 0
    assert initialised is False


@pytest.mark.needs_clients
def test_sweep_of_the_bench_is_the_real_optimizer_of_zeus() -> None:
    names = ["v100-resnet50, CV 10 %, quiet", "a40-bert-huge-pp8, real iterations"]
    terms = Terms()
    real = on_plants(names, 2, terms.budget)
    plants = {cell.plant.name: cell.plant for cell in cells()}
    for name in names:
        for seed, score in enumerate(real[name]):
            ours = sweep(Bench(plants[name], seed, terms), Selector.SLOWDOWN)
            assert score.held_watts == ours.held_watts
            assert (score.slowdown, score.saving) == pytest.approx(
                (ours.slowdown, ours.saving), abs=1e-6
            )
            assert score.commit_units is not None
