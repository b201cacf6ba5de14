"""Zeus's own examples run on the agent with one more line, or lack a name, or measure nothing.

Each needs a GPU, a model or a data set: their frameworks are stand-ins.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from testbed.clients import ZEUS_SOURCE
from testbed.fixtures import entered_once_in
from testbed.framework_stand_ins import LENGTH, STEPS
from testbed.program import ENVIRONMENT, output_of
from testbed.requirements import ROOT
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

pytestmark = [pytest.mark.needs_clients, pytest.mark.exhaustive]


@dataclass(frozen=True)
class Example:
    """One of Zeus's own examples: what it prints, and how many spans the agent counts.

    ``files`` are those that it looks for in its folder. ``spans`` are by service and name.
    ``reason`` says why it cannot run, and ``lacks`` has the names of Zeus that it imports and
    ``install()`` does not have.
    """

    arguments: tuple[str, ...] = ()
    prints: str = ""
    spans: dict[tuple[str, str], int] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    reason: str = ""


SIMULATOR = Example(
    lacks=("zeus._legacy.*",), reason="simulates the paper's optimizers, and measures nothing"
)
NO_ZEUS = Example(reason="does not use Zeus")


def trained(service: str, *arguments: str, epochs: int = 2, **more: Any) -> Example:
    """An example that trains, and reports each step and epoch."""
    spans = {(service, "train_step"): epochs * LENGTH, (service, "epoch"): epochs}
    return Example(arguments, spans=spans, **more)


OWN_EXAMPLES = {
    "batch_size_optimizer/capriccio/train.py": trained(
        "capriccio_train",
        *("--data_dir", "{folder}", "--slice_number", "9", "--model_name_or_path", "model"),
        *("--target_metric", "0.5"),  # of 0.6
        prints=r"Chosen batach size: (128)",
        epochs=1,
        files=("9_train.json", "9_val.json"),
    ),
    "batch_size_optimizer/mnist/train_dp.py": trained(
        "mnist_train_dp",
        *("--target-accuracy", "0.2"),  # of 0.25
        prints=r"Chosen batach_size: (256)",
        epochs=1,
    ),
    "batch_size_optimizer/mnist/train_single_gpu.py": trained(
        "mnist_train_single_gpu",
        *("--target-accuracy", "0.2"),
        prints=r"Chosen batach_size: (256)",
        epochs=1,
    ),
    "carbon_emission_monitor/run_clm.py": Example(
        reason="asks web services for the place of the host and its carbon intensity"
    ),
    "huggingface/run_clm.py": Example(spans={("huggingface_run_clm", "train_step"): STEPS}),
    "huggingface/run_gemma_sft_qlora.py": Example(
        spans={("huggingface_run_gemma_sft_qlora", "train_step"): STEPS}
    ),
    "jax/measure_energy.py": Example(prints=r"GPU 0 consumed (\d+\.\d+) Joules\."),
    "pipeline_frequency_optimizer/profile_p2p.py": Example(prints=r"Power \(W\): (\d+\.\d+)"),
    "pipeline_frequency_optimizer/run_optimization.py": NO_ZEUS,
    "power_limit_optimizer/train_dp.py": trained(
        "power_limit_optimizer_train_dp", "data", "--epochs", "2"
    ),
    "power_limit_optimizer/train_fsdp.py": trained(
        "power_limit_optimizer_train_fsdp", "--epochs", "2"
    ),
    "power_limit_optimizer/train_single.py": trained(
        "power_limit_optimizer_train_single", "data", "--epochs", "2"
    ),
    "prometheus/train_single.py": Example(
        ("data", "--epochs", "2"),
        spans={
            ("training_energy_histogram", "training_energy"): 2,
            ("training_energy_counter", "epoch_energy"): 1,
        },
    ),
    "research_reproducibility/zeus_nsdi23/capriccio/generate.py": NO_ZEUS,
    "research_reproducibility/zeus_nsdi23/run_alibaba.py": SIMULATOR,
    "research_reproducibility/zeus_nsdi23/run_single.py": SIMULATOR,
}
"""The examples in the source distribution of Zeus."""

ENVIRON = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "ZEUS_SERVER_URL": "http://localhost:30100"}
CHANGED_LINE = "import wattspan.compat.zeus; wattspan.compat.zeus.install()\n"
# Prints the names of Zeus that scripts import and that cannot be imported, after each script's own.
MISSING = """
import ast, importlib, sys
from testbed.framework_stand_ins import provide
provide()
for script in sys.argv[1:]:
    for node in ast.walk(ast.parse(open(script).read())):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "zeus":
            for one in node.names:
                try:
                    getattr(importlib.import_module(node.module), one.name)
                except (ImportError, AttributeError):
                    print(f"{script} {node.module}.{one.name}")
"""


agent = entered_once_in(lambda folder: SpanAgent(folder, profile="two-socket-h100"), "agent")


def printed(*command: str, **environ: str) -> str:
    """The output of a program of this interpreter, with ``testbed`` among its packages."""
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}"}
    return output_of(
        sys.executable, *command, timeout=120, environ={**ENVIRONMENT, **path, **environ}
    )


def own_example(name: str) -> Path:
    return ZEUS_SOURCE / "examples" / name


def test_each_own_example_of_zeus_runs_or_lacks_a_name() -> None:
    examples = own_example("").rglob("*.py")
    assert {str(one.relative_to(own_example(""))) for one in examples} == set(OWN_EXAMPLES)
    scripts = [str(own_example(name)) for name in OWN_EXAMPLES]
    missing: dict[str, set[str]] = {script: set() for script in scripts}
    for line in printed("-c", CHANGED_LINE + MISSING, *scripts).splitlines():
        script, _, lacking = line.rpartition(" ")
        missing[script].add(lacking)
    for name, example in OWN_EXAMPLES.items():
        lacks = missing[str(own_example(name))]
        forms = {one: [form for form in example.lacks if fnmatch(one, form)] for one in lacks}
        assert all(forms.values()), f"{name} lacks {lacks}"
        assert {form for found in forms.values() for form in found} == set(example.lacks), name
        assert example.reason or not lacks, name


@pytest.mark.parametrize("name", [name for name, one in OWN_EXAMPLES.items() if not one.reason])
def test_own_example_of_zeus_runs_with_one_more_line(
    name: str, agent: SpanAgent, tmp_path: Path
) -> None:
    example = OWN_EXAMPLES[name]
    lines = own_example(name).read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith("from zeus"))
    script = tmp_path / "_".join(Path(name).parts[-2:])  # names the service
    script.write_text("".join([*lines[:first], CHANGED_LINE, *lines[first:]]))
    for file in example.files:
        (tmp_path / file).write_text("[]")
    arguments = [one.format(folder=tmp_path) for one in example.arguments]
    runner = ("-m", "testbed.framework_stand_ins", str(script), *arguments)
    text = printed(*runner, WATTSPAN_RUN_DIR=str(agent.run_dir), **ENVIRON)
    if example.prints:
        (figure,) = re.findall(f"^{example.prints}$", text, re.MULTILINE)
        assert float(figure) > 0
    for (service, span), count in example.spans.items():
        spans = {"service_name": service, "span_name": span}
        eventually(
            lambda spans=spans, count=count: (
                agent.samples("wattspan_spans_total", **spans) == [count]
            ),
            f"{count} spans {span} of {service} are counted",
        )
