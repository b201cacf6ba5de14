"""Checks across settings: contradictions and settings without effect."""

from pathlib import Path
from typing import Any

import pytest

from wattspan.config import Config, TunedJobSettings, load
from wattspan.config.settings import ineffective_settings
from wattspan.ports import ConfigError

JOB = '[[autotune.job]]\nspan = "step"\n'


def read(text: str, tmp_path: Path, **environ: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load(path, environ=environ)


def fault(text: str, tmp_path: Path, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path, **environ)
    (line,) = str(caught.value).splitlines()
    return line.removeprefix(f"{tmp_path}/")


PIPELINE = f"{JOB}pipeline = {{stage = 's', microbatch = 'm', instruction = 'i'}}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{JOB}pipeline = {{stage = 's', microbatch = 'm'}}",
            "it names the attributes stage, microbatch, instruction, each of them and no others",
        ),
        (
            f"{JOB}pipeline = {{stage = '', microbatch = 'm', instruction = 'i'}}",
            "it names the attributes stage, microbatch, instruction, each of them and no others",
        ),
        (
            PIPELINE.replace('span = "step"', 'service = "gpt"'),
            "a pipeline needs the name of the span that is one iteration of a rank",
        ),
        (f'{PIPELINE}kind = "requests"', "iterations of a pipeline are steps"),
        (f'{PIPELINE}work = "tokens"', "has no effect in a pipeline"),
        (PIPELINE, "a pipeline is tuned by the clocks of its GPUs. Add gpu_clock"),
    ],
)
def test_contradiction_of_a_pipeline_is_named(text: str, expected: str, tmp_path: Path) -> None:
    clocks = "" if text == PIPELINE else '[autotune]\nknobs = ["gpu_clock"]\n'
    assert expected in fault(clocks + text, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            PIPELINE.replace("}", ', replica = "dp"}') + "hosts = 2",
            "replica names pipelines that each run on one host. Remove it",
        ),
        (f'{JOB}kind = "requests"\nhosts = 2', "requests are served by each host alone"),
        (f"{JOB}hosts = 65", "65 is out of bounds"),
    ],
)
def test_hosts_of_another_job_than_a_synchronous_one_are_refused(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert expected in fault(f'[autotune]\nknobs = ["gpu_clock"]\n{text}', tmp_path)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, False),
        ({"hosts": 2}, True),
        ({"pipeline": {"replica": "r"}}, True),
        ({"pipeline": {"stage": "s"}}, False),
    ],
)
def test_job_may_run_on_several_hosts(more: dict[str, Any], *, expected: bool) -> None:
    assert TunedJobSettings(span="step", **more).on_several_hosts is expected


def test_pipeline_may_name_the_attribute_of_its_replica(tmp_path: Path) -> None:
    replicated = PIPELINE.replace("'i'}", "'i', replica = 'r'}")
    config = read(f'[autotune]\nknobs = ["gpu_clock"]\n{replicated}', tmp_path)
    assert config.autotune.job[0].pipeline["replica"] == "r"


def test_empty_attribute_of_a_replica_is_refused(tmp_path: Path) -> None:
    replicated = PIPELINE.replace("'i'}", "'i', replica = ''}")
    found = fault(f'[autotune]\nknobs = ["gpu_clock"]\n{replicated}', tmp_path)
    assert "it names the attributes stage, microbatch, instruction" in found


def test_pipeline_names_the_attributes_of_its_instructions(tmp_path: Path) -> None:
    config = read(f'[autotune]\nknobs = ["gpu_clock"]\n{PIPELINE}', tmp_path)
    assert dict(config.autotune.job[0].pipeline) == {
        "stage": "s",
        "microbatch": "m",
        "instruction": "i",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[autotune]\nmode = "apply"\nmax_slowdown = 0',
            "3: Bad value for 'autotune.max_slowdown': a budget of 0 allows no trial, "
            'because trials take time. Set a budget such as 0.02, or set [autotune] mode = "off".',
        ),
        (
            f"{JOB}max_slowdown = 0.0",
            "3: Bad value for 'autotune.job[0].max_slowdown': a budget of 0 allows no trial, "
            'because trials take time. Set a budget such as 0.02, or set [autotune] mode = "off".',
        ),
        (
            "[autotune]\nmax_slowdown = 5",
            "2: Bad value for 'autotune.max_slowdown': 5 is out of bounds, at most 1; 0.05 is 5 %.",
        ),
        (
            '[autotune]\nmax_slowdown = "5%"',
            "2: Bad value for 'autotune.max_slowdown': expected number, got \"5%\"; 0.05 is 5 %.",
        ),
        (
            "[autotune]\nmax_slowdown = -0.05",
            "2: Bad value for 'autotune.max_slowdown': -0.05 is out of bounds, at least 0; "
            "0.05 is 5 %.",
        ),
        (
            "[autotune]\nmax_slowdown = nan",
            "2: Bad value for 'autotune.max_slowdown': nan is out of bounds, at least 0; "
            "0.05 is 5 %.",
        ),
        (
            "[autotune]\nfloor = 60",
            "2: Bad value for 'autotune.floor': 60 is out of bounds, at most 1; 0.6 is 60 %.",
        ),
        (
            "[autotune]\nconfidence = 1",
            "2: Bad value for 'autotune.confidence': 1 is out of bounds, at most 0.9999; "
            "0.95 is 95 %.",
        ),
        (
            '[autotune]\nknobs = ["gpu_power", "gpu_powr"]',
            '2: Bad value for \'autotune.knobs\': "gpu_powr" is not "gpu_power", "gpu_clock" '
            'or "cpu_power"; did you mean "gpu_power"?',
        ),
        (
            "[autotune]\nknobs = [1]",
            '2: Bad value for \'autotune.knobs\': expected list of "gpu_power", "gpu_clock" or '
            '"cpu_power", got a list.',
        ),
        (
            '[spans.attributes]\nmodel = []\ninput_token = ["app.prompt"]',
            '1: Bad value for \'spans.attributes\': "input_token" is not "input_tokens", '
            '"output_tokens", "cached_tokens", "model", "operation", "queue_time", '
            '"first_token_time", "prefill_time" or "decode_time"; did you mean "input_tokens"?',
        ),
        (
            '[spans.attributes]\nmodel = "app.model"',
            "1: Bad value for 'spans.attributes': expected list of text for \"model\", "
            'got "app.model".',
        ),
        (
            "[autotune]\nknobs = []",
            "2: Bad value for 'autotune.knobs': the list is empty. Name a knob, such as "
            '["gpu_power"], or set [autotune] mode = "off".',
        ),
        (
            '[autotune]\nknobs = ["cpu_power", "cpu_power"]',
            "2: Bad value for 'autotune.knobs': the list names \"cpu_power\" twice. Remove one.",
        ),
        (
            f"{JOB}{JOB}",
            "3: Bad value for 'autotune.job[1]': autotune.job[0] is the same job. "
            "Remove one of them.",
        ),
        (
            f'{JOB}[[autotune.job]]\nspan = "step"\nservice = "trainer"\n',
            "3: Bad value for 'autotune.job[1]': the earlier autotune.job[0] matches "
            "all of its spans. Write the narrower job first.",
        ),
        (
            '[[caps.fixed]]\ndevice = "0"\nwatts = 200\nknob = "gpu_clock"',
            "4: Bad value for 'caps.fixed[0].knob': a clock limit is not in watts. "
            'Name "gpu_power" or "cpu_power".',
        ),
        (
            '[[caps.fixed]]\ndevice = ""\nwatts = 200',
            "2: Bad value for 'caps.fixed[0].device': \"\" names no device.",
        ),
        (
            '[[caps.fixed]]\ndevice = "0"\nwatts = 200\n[[caps.fixed]]\ndevice = "0"\nwatts = 9',
            "4: Bad value for 'caps.fixed[1]': \"0\" already has a cap of this knob. Remove one.",
        ),
        (
            "[caps]\nbudget_watts = 500\nreserve_watts = 500",
            "2: Bad value for 'caps.budget_watts': reserve_watts = 500 leaves nothing of 500 W for "
            "devices. Raise the budget or lower the reserve.",
        ),
        (
            '[caps]\nbudget_file = "budget.toml"',
            "2: Bad value for 'caps.budget_file': \"budget.toml\" is a relative path. "
            "Write an absolute path.",
        ),
        (
            '[caps]\nbudget_watts = 500\n[[caps.priority]]\ndevice = "0"\n'
            '[[caps.priority]]\ndevice = "0"\npriority = 3',
            "5: Bad value for 'caps.priority[1]': \"0\" already has a priority. Remove one.",
        ),
    ],
)
def test_contradictory_settings_are_faults_at_their_line(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert fault(text, tmp_path) == f"config.toml:{expected}"


def test_fault_names_the_environment_variable_of_the_value(tmp_path: Path) -> None:
    told = fault("[caps]\nreserve_watts = 900", tmp_path, WATTSPAN_CAPS_BUDGET_WATTS="800")
    assert told.startswith("WATTSPAN_CAPS_BUDGET_WATTS: Bad value for 'caps.budget_watts': ")


ON = f'[autotune]\nmode = "apply"\n{JOB}'


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            f'[autotune]\nknobs = ["gpu_clock"]\nmode = "advise"\n{JOB}',
            "does not report its locked clocks",
        ),
        (f"{ON}[spans]\nenabled = false", "by its spans"),
        ('[autotune]\nmode = "apply"', "applies to no job"),
        (f'{ON}mode = "advise"', "applies to no job"),
        (f'{JOB}mode = "apply"', "The mode of autotune.job[0] has no effect"),
        ('[autotune]\ndeclared = "allow"', 'declared = "allow" has no effect'),
        ("[caps]\nreserve_watts = 100", "reserve_watts has no effect"),
        ('[[caps.priority]]\ndevice = "0"', "[[caps.priority]] has no effect"),
        (
            '[caps]\nfloor_watts = 150\n[[caps.fixed]]\ndevice = "0"\nwatts = 100',
            "caps.fixed[0] asks for 100 W",
        ),
    ],
)
def test_ineffective_settings_are_warnings(text: str, part: str, tmp_path: Path) -> None:
    (warning,) = read(text, tmp_path).warnings
    assert part in warning
    assert warning.endswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "",
        ON,
        '[autotune]\nmode = "advise"',
        '[autotune]\nmode = "apply"\napply_found = true',
        '[autotune]\nmode = "apply"\ndeclared = "allow"',
        f'[autotune]\nmode = "advise"\n{JOB}mode = "apply"',
        '[autotune]\nknobs = ["gpu_clock"]',  # disabled
        f'{ON}[[autotune.job]]\nservice = "server"\nkind = "requests"\nlatency = "1s"',
        '[[autotune.job]]\nservice = "a"\nspan = "b"\n[[autotune.job]]\nservice = "a"',
        "[caps]\nbudget_watts = 500\nreserve_watts = 499",
        '[caps]\nbudget_file = "/run/budget"\nreserve_watts = 499',
        '[[caps.fixed]]\ndevice = "*"\nwatts = 200\n[[caps.fixed]]\ndevice = "0"\nwatts = 150',
    ],
)
def test_valid_settings_give_no_warning(text: str, tmp_path: Path) -> None:
    assert read(text, tmp_path).warnings == ()


def test_tuning_is_enabled_by_two_environment_variables() -> None:
    config = load(
        None,
        environ={"WATTSPAN_AUTOTUNE_MODE": "apply", "WATTSPAN_AUTOTUNE_APPLY_FOUND": "true"},
        default=Path("/nonexistent/config.toml"),
    )
    assert (config.autotune.mode, config.autotune.max_slowdown) == ("apply", 0.05)
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[autotune]\ngroups = ["web.service"]', ["[autotune] groups"]),
        ('[autotune]\ngpus = ["0"]\ngroups = ["web.service"]', ["[autotune] gpus"]),
        ('[spans]\nforward_headers = "x-tenant=a"', ["[spans] forward_headers"]),
        ("[spans]\nforward_spool = true", ["[spans] forward_spool"]),
        ('[spans]\nforward = "http://127.0.0.1:4318"\nforward_spool = true', []),
    ],
)
def test_setting_without_what_it_needs_is_told(text: str, named: list[str], tmp_path: Path) -> None:
    sentences = list(ineffective_settings(read(text, tmp_path)))
    assert [one.partition(" has no effect")[0] for one in sentences] == named
