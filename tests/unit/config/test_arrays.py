"""Tables that may be written any number of times: ``[[autotune.job]]`` and its like."""

from pathlib import Path

import pytest

from wattspan.config import Config, FlagValue, SettingOrigin, TunedJobSettings, load
from wattspan.config.tables import FixedCapSettings, PrioritySettings
from wattspan.config.writing import to_toml
from wattspan.model import Knob
from wattspan.model.settings import Duration
from wattspan.ports import ConfigError

NOWHERE = Path("/nonexistent/config.toml")

FILE = """\
[autotune]
mode = "apply"

[[autotune.job]]     # the first
service = "trainer"
span = "train_step"
max_slowdown = 0.03

[[autotune.job]]
service = "server"
kind = "requests"
latency = "250ms"

[caps]
budget_watts = 1200

[[caps.fixed]]
device = "*"
watts = 250

[[caps.priority]]
device = "0"
priority = 5
"""


def read(text: str, tmp_path: Path, environ: dict[str, str] | None = None) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path, environ=environ or {})


def faults(text: str, tmp_path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path)
    return [line.removeprefix(f"{tmp_path}/") for line in str(caught.value).splitlines()]


def test_each_table_of_an_array_is_read_with_its_own_defaults(tmp_path: Path) -> None:
    config = read(FILE, tmp_path)
    assert config.autotune.job == (
        TunedJobSettings(service="trainer", span="train_step", max_slowdown=0.03),
        TunedJobSettings(service="server", kind="requests", latency=Duration.parse("250ms")),
    )
    assert config.caps.fixed == (FixedCapSettings(device="*", watts=250, knob=Knob.GPU_POWER),)
    assert config.caps.priority == (PrioritySettings(device="0", priority=5),)


def test_array_may_be_written_on_one_line(tmp_path: Path) -> None:
    config = read('[autotune]\njob = [{span = "a"}, {span = "b", work = "n"}]', tmp_path)
    assert config.autotune.job == (TunedJobSettings(span="a"), TunedJobSettings(span="b", work="n"))


def test_origin_of_each_value_is_its_own_line(tmp_path: Path) -> None:
    config = read(FILE, tmp_path)
    origins = config.origins
    assert origins["autotune.job[0].span"] == SettingOrigin("file", f"{tmp_path}/config.toml:6")
    assert origins["autotune.job[1].service"] == SettingOrigin("file", f"{tmp_path}/config.toml:10")
    assert config.origin("autotune.job[1].span") == SettingOrigin("default")
    assert origins["caps.fixed[0].watts"] == SettingOrigin("file", f"{tmp_path}/config.toml:19")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '[[autotune.job]]\nspan = "a"\n[[autotune.job]]\nservice = "b"\nspn = "c"',
            "5: Unknown key 'autotune.job[1].spn': did you mean 'span'?",
        ),
        (
            '[[autotune.job]]\nspan = "a"\npercentile = 99',
            "3: Bad value for 'autotune.job[0].percentile': 99 is out of bounds, at most 0.9999; "
            "0.99 is the 99th percentile.",
        ),
        (
            '[[autotune.job]]\nspan = "a"\n\nlatency = 250',
            "4: Bad value for 'autotune.job[0].latency': "
            'expected a duration such as "100ms", "2s" or "24h", got 250.',
        ),
        (
            '[[autotune.job]]\nspan = "a"\nkind = "step"',
            "3: Bad value for 'autotune.job[0].kind': "
            '"step" is not "auto", "steps" or "requests"; did you mean "steps"?',
        ),
        (
            '[[autotune.job]]\nspan = "a"\n[[autotune.job]]\nwork = "tokens"',
            "3: [autotune.job[1]]: a job needs `service` or `span` to identify its spans.",
        ),
        (
            "[[caps.fixed]]\nwatts = 200\n",
            "1: 'caps.fixed[0]' needs the key 'device': UUID or index of a GPU, a zone such as "
            '"intel-rapl:0", or "*".',
        ),
        (
            '[autotune.job]\nspan = "a"',
            "1: Bad value for 'autotune.job': expected tables, each [[autotune.job]], got a table.",
        ),
        (
            '[autotune]\nmode = "off"\njob = "trainer"',
            "3: Bad value for 'autotune.job': "
            'expected tables, each [[autotune.job]], got "trainer".',
        ),
        (
            '[autotune]\njob = [\n  {span = "a"},\n  3,\n]',
            "2: Bad value for 'autotune.job[1]': expected a table, [[autotune.job]], got 3.",
        ),
        (
            '[autotune]\njob = [{spam = "a"}]',
            "2: Unknown key 'autotune.job[0].spam': did you mean 'span'?",
        ),
        (
            '[[autotune.jobs]]\nspan = "a"',
            "1: Unknown key 'autotune.jobs': did you mean 'job'?",
        ),
        (
            "autotune.job = [{}]",
            "1: [autotune.job[0]]: a job needs `service` or `span` to identify its spans.",
        ),
    ],
)
def test_fault_in_an_array_names_its_line_its_key_and_the_remedy(
    text: str, fault: str, tmp_path: Path
) -> None:
    assert faults(text, tmp_path) == [f"config.toml:{fault}"]


def test_all_errors_of_all_tables_are_reported_by_line(tmp_path: Path) -> None:
    text = """\
[[autotune.job]]
spn = "a"
[autotune]
mode = "of"
[[caps.fixed]]
device = 0
watts = 0
[[caps.fixed]]
"""
    assert [fault.partition(": ")[0] for fault in faults(text, tmp_path)] == [
        "config.toml:2",
        "config.toml:4",
        "config.toml:6",
        "config.toml:7",
        "config.toml:8",
        "config.toml:8",
    ]


# ------------------------------------------------------------------------- sources of arrays


def test_environment_sets_single_values_and_leaves_the_arrays(tmp_path: Path) -> None:
    environ = {"WATTSPAN_AUTOTUNE_MODE": "advise", "WATTSPAN_CAPS_LEASE": "20s"}
    config = read(FILE, tmp_path, environ | {"WATTSPAN_AUTOTUNE_KNOBS": "gpu_power,cpu_power"})
    assert (config.autotune.mode, str(config.caps.lease)) == ("advise", "20s")
    assert config.autotune.knobs == (Knob.GPU_POWER, Knob.CPU_POWER)
    assert len(config.autotune.job) == 2


@pytest.mark.parametrize("value", ['[{span = "a"}]', "trainer", ""])
def test_variable_that_would_set_an_array_is_a_fault(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, environ={"WATTSPAN_AUTOTUNE_JOB": value}, default=NOWHERE)
    assert str(caught.value) == (
        "WATTSPAN_AUTOTUNE_JOB: Only the file can contain tables [[autotune.job]]. "
        "Write them there."
    )


def test_variable_that_would_set_a_key_in_an_array_is_ignored_with_the_reason() -> None:
    config = load(None, environ={"WATTSPAN_CAPS_FIXED_0_WATTS": "200"}, default=NOWHERE)
    assert config.warnings == (
        "WATTSPAN_CAPS_FIXED_0_WATTS is ignored. Only the file can contain tables "
        "[[caps.fixed]]. Write them there.",
    )


@pytest.mark.parametrize("key", ["autotune.job", "autotune.job[0].span", "autotune.job.span"])
def test_flag_that_would_set_an_array_is_a_fault(key: str) -> None:
    flag = FlagValue(f"--set {key}", "x")
    with pytest.raises(ConfigError) as caught:
        load(None, environ={}, flags={key: flag}, default=NOWHERE)
    assert str(caught.value) == (
        f"--set {key}: Only the file can contain tables [[autotune.job]]. Write them there."
    )


def test_command_may_bring_tables_of_its_own() -> None:
    flag = FlagValue("wattspan demo", [{"span": "train_step"}])
    config = load(None, environ={}, flags={"autotune.job": flag}, default=NOWHERE)
    assert config.autotune.job == (TunedJobSettings(span="train_step"),)
    wrong = FlagValue("wattspan demo", [{"spn": "train_step"}])
    with pytest.raises(ConfigError, match=r"Unknown key 'autotune\.job\[0\]\.spn'"):
        load(None, environ={}, flags={"autotune.job": wrong}, default=NOWHERE)


def test_flag_sets_single_values_with_arrays_present(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    flags = {"autotune.mode": FlagValue("--set", "off"), "caps.capper": FlagValue("--set", "false")}
    config = load(path, environ={}, flags=flags)
    assert (config.autotune.mode, config.caps.capper) == ("off", False)
    assert len(config.autotune.job) == 2


# ------------------------------------------------------------------------------ written down


def test_arrays_are_shown_after_their_table(tmp_path: Path) -> None:
    shown = to_toml(read(FILE, tmp_path))
    headers = [line for line in shown.splitlines() if line.startswith("[")]
    between = headers[headers.index("[autotune]") : headers.index("[cost]")]
    assert between == [
        "[autotune]",
        "[[autotune.job]]",
        "[[autotune.job]]",
        "[caps]",
        "[[caps.fixed]]",
        "[[caps.priority]]",
    ]
    assert shown.count("max_slowdown") == 2  # the second job has none


def test_shown_arrays_read_back_unchanged(tmp_path: Path) -> None:
    config = read(FILE, tmp_path)
    assert read(to_toml(config, origins=True), tmp_path).tables == config.tables


def test_empty_array_is_not_shown(tmp_path: Path) -> None:
    shown = to_toml(read("", tmp_path))
    assert "[[" not in shown
    assert "job" not in [line.partition(" ")[0] for line in shown.splitlines()]


def test_origins_stand_behind_the_values_of_an_array(tmp_path: Path) -> None:
    shown = to_toml(read(FILE, tmp_path), origins=True).splitlines()
    begin = shown.index("[[autotune.job]]")
    first = dict(line.split(" = ", 1) for line in shown[begin + 1 : shown.index("", begin)])
    assert first["service"].split() == ['"trainer"', "#", f"{tmp_path}/config.toml:5"]
    assert first["work"].split() == ['""', "#", "default"]
