"""Every thread of the agent has a stated treatment of unexpected errors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import wattspan

AGENT = Path(wattspan.__file__).parent

AGAIN = "runs again after a delay, and is a failure of the source `threads` meanwhile"
GUARDED = "each turn catches the error and reports it; the next turn follows"
ENDS_AGENT = "ends the agent, with the cause in the log"
TOLD = "is passed to the caller, who waits for the result"
SHOWN = "ends the thread; the source `threads` shows it until the parts are started anew"
APPLICATION = "ends the thread of a program other than the agent, which prints it"

TREATMENT = {
    "cli/frontier/measurement.py:FixedLease.__init__": [TOLD],
    "cli/measure/__init__.py:run_child": [TOLD],
    "compat/zeus/footprint.py:Gatherer.add": [GUARDED],
    "compat/zeus/limits.py:HeldLimits.hold": [APPLICATION],
    "compat/zeus/log_file.py:WindowLog._start": [APPLICATION],
    "compat/zeus/metric.py:PushedFigures.add": [GUARDED],
    "fleet/participant.py:FleetParticipant.__init__": [GUARDED],
    "frontier/runner.py:TrialRunner._measure": [APPLICATION],
    "http/server.py:HttpServer.start": [SHOWN],
    "http/server.py:_DaemonPool.__init__": [TOLD],
    "otlp/forwarder.py:Forwarder.__init__": [GUARDED],
    "processes/cpu_sampler.py:CpuSampler.start": [AGAIN],
    "service/agent.py:Agent._in_time": [GUARDED],
    "service/agent.py:Agent._run": [ENDS_AGENT],
    "service/agent.py:ServiceGroup.add_thread": [AGAIN],
    "service/assembly.py:FootprintTracker.__init__": [GUARDED],
    "service/assembly.py:build_agent": [AGAIN, AGAIN],
    "service/capper_process.py:CapperProcess.start": [AGAIN],
    "service/engine_scraper.py:EngineScrapers.__init__": [AGAIN],
    "service/plan_processes.py:search_plan": [TOLD],
    "service/span_assembly.py:SpanAssembly._add_joiner": [AGAIN],
    "service/systemd.py:StopRequest.register": [SHOWN],
    "service/tuning_assembly.py:TuningAssembly.__post_init__": [AGAIN],
    "service/tuning_assembly.py:TuningAssembly._add_audit": [AGAIN],
    "service/tuning_assembly.py:TuningAssembly._add_exchange": [GUARDED],
    "service/tuning_assembly.py:TuningAssembly._add_tuner": [AGAIN],
    "sources/driver_thread.py:DriverThreadSource.start": [AGAIN],
    "sources/nvml/dcgm.py:DcgmExporter.activity": [GUARDED],
    "storage/async_writer.py:AsyncWriter._enqueue": [TOLD],
}


MAKERS = {"Thread", "Timer", "add_thread", "ThreadPoolExecutor"}


def uses(path: Path) -> Iterator[str]:
    """The functions of a module that make a thread, one entry for each."""
    module = path.relative_to(AGENT).as_posix()

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (*names, child.name)
            elif isinstance(child, ast.Call) and makes_thread(child.func):
                yield f"{module}:{'.'.join(names)}"
            yield from visit(child, inner)

    text = path.read_text()
    return visit(ast.parse(text), ()) if any(one in text for one in MAKERS) else iter(())


def makes_thread(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    return name in MAKERS


def found() -> list[str]:
    modules = (one for one in AGENT.rglob("*.py") if AGENT / "emulation" not in one.parents)
    return sorted(use for module in modules for use in uses(module))


@pytest.mark.slow
def test_every_thread_has_a_stated_treatment_of_errors() -> None:
    stated = sorted(use for use, treatments in TREATMENT.items() for _ in treatments)
    assert found() == stated


@pytest.mark.parametrize("call", ["threading.Thread(target=f)", "Thread()", "s.add_thread('a', f)"])
def test_new_thread_is_found(call: str) -> None:
    (expression,) = ast.parse(call).body
    assert isinstance(expression, ast.Expr)
    assert isinstance(expression.value, ast.Call)
    assert makes_thread(expression.value.func)
