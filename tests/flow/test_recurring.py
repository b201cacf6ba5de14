"""Recurring trainings on a running agent: the example, the command line, and killed runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from testbed.fixtures import entered_once_in
from testbed.program import ENVIRONMENT, PROGRAM, output_of
from testbed.requirements import ROOT
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

EXAMPLE = ROOT / "examples" / "recurring" / "nightly.py"
WAITING = """
import sys
from wattspan.recurring import BatchSizeOptimizer
one = BatchSizeOptimizer("killed", [16, 32], 32, 0.8, True, 10)
print(one.get_batch_size(), flush=True)
one.on_train_begin()
sys.stdin.read()
"""


agent = entered_once_in(lambda folder: SpanAgent(folder, profile="one-socket-h100"), "agent")


def environ(agent: SpanAgent) -> dict[str, str]:
    return {**ENVIRONMENT, "WATTSPAN_RUN_DIR": str(agent.run_dir)}


def printed(agent: SpanAgent, *command: object) -> str:
    return output_of(*command, timeout=60, environ=environ(agent))


def recurring(agent: SpanAgent, *arguments: str) -> str:
    return printed(agent, *PROGRAM, "recurring", *arguments)


def status(agent: SpanAgent, job: str) -> dict[str, Any]:
    (found,) = json.loads(recurring(agent, "status", job, "--json"))["jobs"]
    return found  # type: ignore[no-any-return]


def test_example_tries_the_sizes_and_records_their_energy(agent: SpanAgent) -> None:
    sizes = []
    for _ in range(2):
        text = printed(agent, sys.executable, "-W", "error", EXAMPLE)
        sizes.append(text.split(":")[0])
    assert sizes == ["batch size 32", "batch size 16"]
    job = status(agent, "nightly")
    assert (job["gpus"], job["runs"], job["running"]) == ("1 x NVIDIA H100 80GB HBM3", 2, 0)
    tried = {one["batch_size"]: one for one in job["sizes"] if one["runs"]}
    for one in tried.values():
        assert one["reached"] == 1
        # An idle board: the time costs more than the energy, at 700 W against about 70 W.
        assert 0 < one["energy_joules"] < one["cost_joules"]
    assert "nightly on 1 x NVIDIA H100 80GB HBM3: 2 runs, pruning" in recurring(agent, "status")


def test_killed_run_is_lost_and_its_size_is_tried_again(agent: SpanAgent) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=environ(agent),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"32\n"
    assert status(agent, "killed")["running"] == 1
    process.kill()
    process.communicate()
    eventually(lambda: status(agent, "killed")["running"] == 0, "the run is lost")
    gpus = status(agent, "killed")["gpus"]
    assert recurring(agent, "next", "killed", "--gpus", gpus) == "32\n"


def test_shell_script_chooses_and_reports(agent: SpanAgent, tmp_path: Path) -> None:
    program, script = tmp_path / "wattspan", tmp_path / "nightly.sh"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    terms = "--batch-sizes 16,32,64 --default 32 --target 0.8 --max-epochs 10"
    end = "--joules 100 --seconds 2 --power 700"
    script.write_text(
        "set -e\n"
        f'size=$("{program}" recurring next shell {terms})\n'
        'echo "trains with $size"\n'
        f'"{program}" recurring report shell reached {end}\n'
        f'echo "then $("{program}" recurring next shell)"\n'
    )
    assert printed(agent, "bash", script) == "trains with 32\nRecorded.\nthen 16\n"
