"""Settings that match nothing: found by the capper, by `doctor` and by `config check`.

``configuration`` is the text of the file, ``devices`` are those of the host with a knob.
``checked``
are parts of the sentences of `config check`, which knows no host, ``found`` of those on it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from testbed.field import FieldCase, field_cases

from wattspan.capper.planner import unmatched_settings
from wattspan.config import load
from wattspan.config.settings import ineffective_settings
from wattspan.model import CapKey, Knob, KnobState

W = 1000
BOARD = ("GPU-6a1f0c3e", "0")
DEVICES = {
    "board": KnobState(
        CapKey(Knob.GPU_POWER, "gpu:GPU-6a1f0c3e"), "NVIDIA H100 0", 200 * W, 700 * W, 700 * W,
        700 * W, aliases=BOARD,
    ),
    "board clock": KnobState(
        CapKey(Knob.GPU_CLOCK, "gpu:GPU-6a1f0c3e"), "NVIDIA H100 0", 210, 1980, 1980, aliases=BOARD
    ),
    "package": KnobState(
        CapKey(Knob.CPU_POWER, "rapl:package-0"), "package-0", None, 205 * W, 205 * W, 205 * W,
        205 * W, aliases=("intel-rapl:0", "package-0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", field_cases("unmatched_settings"))
def test_setting_that_matches_nothing_says_so(case: FieldCase, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(case["configuration"])
    config = load(file, environ={})
    checked = list(ineffective_settings(config))
    states = [DEVICES[name] for name in case["devices"]]
    tunable = config.autotune.gpus if config.autotune.mode != "off" else ()
    found = list(unmatched_settings(config.caps, states, tunable))
    for sentences, parts in ((checked, case["checked"]), (found, case["found"])):
        assert len(sentences) == len(parts), sentences
        for sentence, part in zip(sentences, parts, strict=True):
            assert part in sentence
