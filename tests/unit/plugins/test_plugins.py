import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint

import pytest
from testbed import plugin_bench

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.config import Config
from wattspan.model import SECOND
from wattspan.model.settings import Table
from wattspan.plugins import (
    ACTUATORS,
    AWAITED_INTERVAL,
    EXPORTERS,
    SOURCES,
    AwaitedPlugins,
    Plugins,
    discover,
    load_actuators,
    open_exporters,
    open_sources,
    source_advice,
)
from wattspan.ports import (
    ActuatorPlugin,
    ConfigError,
    CounterSource,
    Exporter,
    ExporterContext,
    ExporterPlugin,
    SnapshotView,
    SourceContext,
    SourceError,
    SourcePlugin,
)
from wattspan.service.agent import ExporterGroup
from wattspan.service.poller import LatestSnapshot
from wattspan.testing import FakeDirectory, ManualClock, ReplaySource


def installed(
    sources: Iterable[tuple[str, str]] = (), exporters: Iterable[tuple[str, str]] = ()
) -> Plugins:
    def find(group: str) -> Iterable[EntryPoint]:
        pairs = {SOURCES: sources, EXPORTERS: exporters}[group]
        return [EntryPoint(name, f"testbed.{target}", group) for name, target in pairs]

    return discover(find)


def configured(plugins: Plugins) -> Config:
    tables = plugins.schema.tables

    def family(name: str) -> dict[str, Table]:
        return {t.partition(".")[2]: tables[t]() for t in tables if t.startswith(f"{name}.")}

    return Config(sources=family("sources"), exporters=family("exporters"))


CONTEXT = SourceContext(ManualClock(), FakeDirectory())
EXPORTER_CONTEXT = ExporterContext(ManualClock(), "1", lambda line: None)


def test_plugins_are_in_alphabetical_order() -> None:
    plugins = installed([("b", "plugin_bench:knob"), ("a", "plugin_bench:good")])
    assert list(plugins.sources) == ["a", "b"]
    assert plugins.broken == ()


def test_schema_includes_tables_of_plugins() -> None:
    schema = installed([("k", "plugin_bench:knob")]).schema
    assert schema.tables["sources.k"] is plugin_bench.Knob


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no_such_module:plugin", "ModuleNotFoundError"),
        ("plugin_bench:missing", "AttributeError"),
        ("plugin_bench:not_a_plugin", "it is str, not a SourcePlugin"),
        ("plugin_bench:crashing_exporter", "it is ExporterPlugin, not a SourcePlugin"),
        ("plugin_bench:no_table", "its settings are not a Table"),
        ("plugin_bench:unresolvable", "NoSuchType"),
    ],
)
def test_broken_plugin_does_not_affect_others(target: str, cause: str) -> None:
    plugins = installed([("bad", target), ("good", "plugin_bench:good")])
    assert list(plugins.sources) == ["good"]
    (broken,) = plugins.broken
    assert broken.table == "sources.bad"
    assert cause in str(broken)
    assert plugins.schema.broken == {"sources.bad"}


def test_plugins_of_the_same_name_are_refused() -> None:
    plugins = installed([("x", "plugin_bench:good"), ("x", "plugin_bench:knob")])
    assert plugins.sources == {}
    (broken,) = plugins.broken
    assert "installed more than once" in str(broken)
    assert "Uninstall all but one" in str(broken)


def test_plugin_found_twice_is_loaded_once() -> None:
    plugins = installed([("x", "plugin_bench:good"), ("x", "plugin_bench:good")])
    assert list(plugins.sources) == ["x"]


def test_source_that_raises_at_opening_is_a_failure() -> None:
    plugins = installed([("bad", "plugin_bench:crashing"), ("good", "plugin_bench:good")])
    opened = open_sources(plugins, configured(plugins), CONTEXT)
    assert list(opened.sources) == ["good"]
    assert opened.failures == ()
    (failure,) = opened.awaited_failures.values()
    assert "[sources.bad]: it does not open, ZeroDivisionError: oops." in str(failure)


def test_broken_plugin_is_a_failure_of_open_sources() -> None:
    plugins = installed([("bad", "no_such_module:plugin")])
    (failure,) = open_sources(plugins, configured(plugins), CONTEXT).failures
    assert failure.source == "bad"
    assert "Reinstall or remove its package" in failure.remedy


def test_disabled_source_is_not_opened() -> None:
    plugins = installed([("k", "plugin_bench:knob")])
    opened = open_sources(plugins, configured(plugins), CONTEXT)
    assert (opened.sources, opened.failures) == ({}, ())


def test_unavailable_enabled_source_raises_and_closes_others() -> None:
    plugins = installed([("a", "plugin_bench:good"), ("z", "plugin_bench:refusing")])
    with pytest.raises(SourceError, match="it is not here"):
        open_sources(plugins, configured(plugins), CONTEXT)
    assert plugin_bench.OPENED[-1].closed


def test_exporter_that_raises_at_opening_does_not_affect_others() -> None:
    plugins = installed(exporters=[("bad", "plugin_bench:crashing_exporter")])
    opened = open_exporters(plugins, configured(plugins), EXPORTER_CONTEXT)
    assert opened.exporters == {}
    assert [*opened.awaited] == ["bad"]
    assert "exporters.bad" in str(opened.awaited_failures["bad"])


class Receiver:
    """An exporter that raises ``error`` at its start."""

    name, address, drops = "push", None, 0

    def __init__(self, error: OSError | None = None) -> None:
        self._error = error

    def start(self, view: SnapshotView) -> None:
        if self._error is not None:
            raise self._error

    def stop(self) -> None: ...


def test_exporter_that_raises_at_opening_or_starting_is_opened_later() -> None:
    clock, lines = ManualClock(0), list[str]()
    view = LatestSnapshot(Ledger(LedgerSettings()).snapshot(clock.now(), "h")).view
    answers: list[Exception | Exporter] = [OSError("no bus"), OSError("no bus")]
    answers += [Receiver(OSError("no port")), last := Receiver()]

    def open_exporter(settings: Table, context: ExporterContext) -> Exporter | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    plugins = Plugins(exporters={"push": ExporterPlugin(Table, open_exporter)})
    opened = open_exporters(plugins, Config(exporters={"push": Table()}), EXPORTER_CONTEXT)
    group, awaited = ExporterGroup(opened.exporters.values()), AwaitedPlugins(clock, lines.append)
    awaited.expect(
        "exporters", opened.awaited, lambda one: group.add(one, view), opened.awaited_failures
    )
    causes = ["OSError: no bus", "OSError: no bus", "ExporterError: Cannot start", ""]
    for cause in causes:
        assert [cause in str(one) for one in awaited.failures] == [True] * (cause != "")
        assert list(group.started) == ([] if cause else [last])
        clock.advance(300)
        awaited.turn()
    assert lines == ["The plugin [exporters.push] is open, and in use from now on."]


def test_late_source_that_fails_does_not_keep_others_from_being_found() -> None:
    answers: list[CounterSource | None] = [None, ReplaySource([])]

    def broken() -> CounterSource | None:
        raise OSError("no bus")

    awaited, found = AwaitedPlugins(ManualClock(0)), list[CounterSource]()
    awaited.expect("sources", {"broken": broken, "late": lambda: answers.pop(0)}, found.append)
    awaited.turn()
    assert [one.cause for one in awaited.failures] == ["it does not open, OSError: no bus"]
    assert found == []
    for _ in range(2):
        awaited.turn()
        assert [one.name for one in found] == ["replay"]


def test_disabled_source_is_not_awaited() -> None:
    class Switch(Table, frozen=True):
        enabled: bool = True

    plugin = SourcePlugin(settings=Switch, open=lambda settings, context: None)
    plugins = Plugins(sources={"off": plugin, "on": plugin})
    config = Config(sources={"off": Switch(enabled=False), "on": Switch()})
    assert [*open_sources(plugins, config, CONTEXT).awaited] == ["on"]


def test_awaited_source_is_opened_only_where_something_may_be_present() -> None:
    opened: list[Table] = []
    present: list[SourceContext] = []

    def open_source(settings: Table, context: SourceContext) -> CounterSource | None:
        opened.append(settings)
        return ReplaySource([]) if present else None

    plugin = SourcePlugin(Table, open_source, present=lambda _: bool(present))
    plugins = Plugins(sources={"late": plugin})
    awaited, found = AwaitedPlugins(ManualClock(0)), list[CounterSource]()
    first = open_sources(plugins, Config(sources={"late": Table()}), CONTEXT)
    awaited.expect("sources", first.awaited, found.append)
    awaited.turn()
    assert found == []
    assert len(opened) == 1, "at the start only"
    present.append(CONTEXT)
    awaited.turn()
    assert len(found) == 1


def test_advice_of_a_faulty_plugin_is_its_fault() -> None:
    def advise(settings: Table) -> Iterable[str]:
        raise ValueError("nonsense")

    plugins = Plugins(sources={"odd": SourcePlugin(Table, lambda *_: None, advise)})
    config = Config(sources={"odd": Table()})
    (sentence,) = source_advice(plugins, config, "odd")
    assert sentence.startswith("[sources.odd] cannot be checked, ValueError: nonsense.")


def actuators_of(names: Iterable[str], *entries: tuple[str, str]) -> dict[str, ActuatorPlugin]:
    found = [EntryPoint(name, f"testbed.{target}", ACTUATORS) for name, target in entries]
    return load_actuators(names, lambda group: found if group == ACTUATORS else [])


def test_actuators_are_loaded_if_the_configuration_names_them() -> None:
    rows = ("good", "plugin_bench:actuators"), ("hostile", "no_such_module:plugin")
    assert actuators_of([], *rows) == {}
    assert actuators_of(["good"], *rows) == {"good": plugin_bench.actuators}


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no_such_module:plugin", "ModuleNotFoundError"),
        ("plugin_bench:good", "it is SourcePlugin, not a ActuatorPlugin"),
    ],
)
def test_named_actuators_that_do_not_load_are_an_error(target: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        actuators_of(["bad"], ("bad", target))


def test_named_actuators_that_are_not_installed_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no installed package has an entry point"):
        actuators_of(["lumen"], ("other", "plugin_bench:actuators"))


@pytest.mark.parametrize("seconds", [0, 90])
def test_source_that_raises_at_opening_is_opened_later(seconds: int) -> None:
    """However long an attempt takes: it delays no measurement."""
    clock, found = ManualClock(0), list[CounterSource]()
    answers: list[Exception | CounterSource] = [OSError("no bus"), OSError("no bus")]

    def open_source(settings: Table, context: SourceContext) -> CounterSource | None:
        clock.advance(seconds)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    plugins = Plugins(sources={"bmc": SourcePlugin(Table, open_source)})
    opened = open_sources(plugins, Config(sources={"bmc": Table()}), CONTEXT)
    awaited = AwaitedPlugins(clock)
    awaited.expect("sources", opened.awaited, found.append, opened.awaited_failures)
    assert [one.cause for one in awaited.failures] == ["it does not open, OSError: no bus"]
    awaited.turn()
    assert found == []
    answers.append(ReplaySource([]))
    clock.advance(AWAITED_INTERVAL / SECOND)
    awaited.turn()
    assert [one.name for one in found] == ["replay"]
    assert awaited.failures == ()


def test_source_that_keeps_failing_is_opened_less_often() -> None:
    attempts: list[int] = []

    def broken() -> CounterSource | None:
        attempts.append(1)
        raise OSError("no bus")

    clock = ManualClock(0)
    awaited = AwaitedPlugins(clock)
    awaited.expect("sources", {"broken": broken}, attempts.remove)
    for _ in range(3600 * SECOND // AWAITED_INTERVAL):
        clock.advance(AWAITED_INTERVAL / SECOND)
        awaited.turn()
    assert 12 <= len(attempts) <= 20


def test_plugin_that_opens_after_the_end_is_not_used() -> None:
    stop, used = threading.Event(), list[int]()

    def open_late() -> int:
        stop.set()
        return 1

    class Passing(threading.Event):
        """Its time passes at once."""

        def wait(self, timeout: float | None = None) -> bool:
            return stop.is_set()

        def is_set(self) -> bool:
            return stop.is_set()

    awaited = AwaitedPlugins(ManualClock(0))
    awaited.expect("sources", {"late": open_late}, used.append)
    awaited.run(Passing())
    assert used == []


def test_failures_of_other_parts_are_not_those_of_awaited_sources_of_the_name() -> None:
    plugins = installed([("x", "plugin_bench:crashing")], [("x", "no_such_module:plugin")])
    opened = open_sources(plugins, configured(plugins), CONTEXT)
    assert [one.thing for one in opened.failures] == ["[exporters.x]"]
    assert [one.thing for one in opened.awaited_failures.values()] == ["[sources.x]"]
