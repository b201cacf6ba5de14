"""Discovery, validation and opening of sources and exporters by entry point."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Generic, TypeVar

from wattspan.config import TABLES, Config, ConfigSchema
from wattspan.model import SECOND, Failure, Trouble
from wattspan.model.settings import Table, keys, quoted
from wattspan.ports import (
    ActuatorPlugin,
    Clock,
    ConfigError,
    CounterSource,
    Exporter,
    ExporterContext,
    ExporterPlugin,
    SourceContext,
    SourcePlugin,
    WattspanError,
)
from wattspan.util.throttle import RetryBackoff

SOURCES = "wattspan.sources"
EXPORTERS = "wattspan.exporters"
ACTUATORS = "wattspan.actuators"

P = TypeVar("P", SourcePlugin, ExporterPlugin, ActuatorPlugin)
T = TypeVar("T")
EntryPoints = Callable[[str], Iterable[EntryPoint]]


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """An installed plugin that cannot be used, with cause and remedy."""

    table: str  # "sources.rapl"
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"The plugin [{self.table}] cannot be used: {self.cause}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class Plugins:
    """The installed plugins by name, in alphabetical order."""

    sources: Mapping[str, SourcePlugin] = field(default_factory=dict)
    exporters: Mapping[str, ExporterPlugin] = field(default_factory=dict)
    broken: tuple[BrokenPlugin, ...] = ()

    @property
    def schema(self) -> ConfigSchema:
        """All configuration tables."""
        tables: dict[str, type[Table]] = dict(TABLES)
        tables |= {f"sources.{name}": plugin.settings for name, plugin in self.sources.items()}
        tables |= {f"exporters.{name}": plugin.settings for name, plugin in self.exporters.items()}
        return ConfigSchema(tables, frozenset(broken.table for broken in self.broken))


def discover(entry_points: EntryPoints | None = None) -> Plugins:
    """Load every installed plugin."""
    find = entry_points or _installed
    broken: list[BrokenPlugin] = []
    sources = _load(find(SOURCES), "sources", SourcePlugin, broken)
    exporters = _load(find(EXPORTERS), "exporters", ExporterPlugin, broken)
    return Plugins(sources, exporters, tuple(broken))


def load_actuators(
    names: Iterable[str], entry_points: EntryPoints | None = None
) -> dict[str, ActuatorPlugin]:
    """The actuator plugins with ``names``; no other plugin is imported. ConfigError."""
    wanted = frozenset(names)
    if not wanted:
        return {}
    broken: list[BrokenPlugin] = []
    found = [one for one in (entry_points or _installed)(ACTUATORS) if one.name in wanted]
    loaded = _load(found, "actuators", ActuatorPlugin, broken)
    for fault in broken:
        raise ConfigError(f"{fault} Or remove it from caps.actuators.")
    for name in sorted(wanted - loaded.keys()):
        raise ConfigError(
            f"Cannot load the actuators {quoted(name)}: no installed package has an entry point of"
            f" this name in {ACTUATORS}. Install one, or correct caps.actuators."
        )
    return loaded


def _installed(group: str) -> Iterable[EntryPoint]:
    return importlib.metadata.entry_points(group=group)


def _load(
    found: Iterable[EntryPoint], family: str, kind: type[P], broken: list[BrokenPlugin]
) -> dict[str, P]:
    by_name: dict[str, dict[str, EntryPoint]] = {}
    for entry in found:
        by_name.setdefault(entry.name, {})[entry.value] = entry
    loaded: dict[str, P] = {}
    for name in sorted(by_name):
        entries = by_name[name]
        if len(entries) > 1:
            # The choice must not depend on the order of sys.path.
            rivals = " and ".join(f"{e.value} ({_origin(e)})" for _, e in sorted(entries.items()))
            cause = f"it is installed more than once, as {rivals}"
            remedy = "Uninstall all but one of these packages."
            broken.append(BrokenPlugin(f"{family}.{name}", cause, remedy))
            continue
        (entry,) = entries.values()
        try:
            loaded[name] = _validated(entry.load(), kind)
        except Exception as error:  # noqa: BLE001 - a plugin's failure must not affect others
            cause = f"{entry.value} does not load, {_cause(error)}"
            remedy = f"Reinstall or remove its package, {_origin(entry)}."
            broken.append(BrokenPlugin(f"{family}.{name}", cause, remedy))
    return loaded


def _validated(plugin: object, kind: type[P]) -> P:
    if not isinstance(plugin, kind):
        raise TypeError(f"it is {type(plugin).__name__}, not a {kind.__name__}")
    if isinstance(plugin, ActuatorPlugin):
        return plugin
    settings: object = plugin.settings
    if not (isinstance(settings, type) and issubclass(settings, Table)):
        raise TypeError("its settings are not a Table")
    keys(plugin.settings)  # invalid annotations fail here rather than later
    return plugin


def _origin(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown package"


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_REPORT = "This is a fault of the plugin: report it to its authors, or set enabled = false."


@dataclass(frozen=True, slots=True)
class OpenedPlugins(Generic[T]):
    """Opened sources or exporters by name, and failures.

    ``awaited`` opens the plugins that found nothing to read, or failed: a driver may be loaded, and
    a device be reached, at any time. Their failures by name are apart from ``failures``.
    """

    sources: Mapping[str, CounterSource] = field(default_factory=dict)
    exporters: Mapping[str, Exporter] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    awaited: Mapping[str, Callable[[], T | None]] = field(default_factory=dict)
    awaited_failures: Mapping[str, Failure] = field(default_factory=dict)


def open_sources(
    plugins: Plugins, config: Config, context: SourceContext
) -> OpenedPlugins[CounterSource]:
    """Open all sources that the configuration does not turn off.

    SourceError for an unavailable source with ``enabled = true``, after those opened before are
    closed. Any other error becomes a failure of that source.
    """
    opened: dict[str, CounterSource] = {}
    awaited: dict[str, Callable[[], CounterSource | None]] = {}
    awaited_failures: dict[str, Failure] = {}
    failures = [_failure(broken.table, broken.cause, broken.remedy) for broken in plugins.broken]
    for name, plugin in plugins.sources.items():
        settings = config.sources[name]
        try:
            source = plugin.open(settings, context)
        except WattspanError:
            for each in opened.values():
                each.close()
            raise
        except Exception as error:  # noqa: BLE001 - a failing source must not affect others
            awaited_failures[name] = _open_failure(f"sources.{name}", error)
            source = None
        if source is not None:
            opened[name] = source
        elif getattr(settings, "enabled", None) is not False:
            awaited[name] = partial(_open_present, plugin, settings, context)
    return OpenedPlugins(
        sources=opened,
        failures=tuple(failures),
        awaited=awaited,
        awaited_failures=awaited_failures,
    )


def _open_present(
    plugin: SourcePlugin, settings: Table, context: SourceContext
) -> CounterSource | None:
    return plugin.open(settings, context) if plugin.present(context) else None


AWAITED_INTERVAL, LONGEST_RETRY = 5 * SECOND, 300 * SECOND
"""Pause between two attempts to open a plugin that found nothing to read, and the longest one
between those of a plugin that fails."""


class AwaitedPlugins:
    """Opens plugins whose driver is loaded, or that failed, while the agent runs.

    Attempts are made in ``run``, by a thread of its own: an attempt may take long, and delays the
    other attempts only.
    """

    def __init__(self, clock: Clock, log: Callable[[str], None] = lambda _: None) -> None:
        self._clock, self._log = clock, log
        self._attempts: dict[str, Callable[[], bool]] = {}
        self._failures: dict[str, Failure] = {}
        self._retries: dict[str, RetryBackoff] = {}
        self._stop = threading.Event()

    def expect(
        self,
        family: str,
        openers: Mapping[str, Callable[[], T | None]],
        use: Callable[[T], object],
        failures: Mapping[str, Failure] = MappingProxyType({}),
    ) -> None:
        """Await plugins, which ``use`` receives once they are open. Before ``run`` only.

        ``failures`` are those of the first attempts, which were made just now.
        """
        for name, open_plugin in openers.items():
            table = f"{family}.{name}"
            self._attempts[table] = partial(self._open, open_plugin, use)
            self._retries[table] = RetryBackoff(AWAITED_INTERVAL, LONGEST_RETRY)
            if name in failures:
                self._failures[table] = failures[name]

    def _open(self, open_plugin: Callable[[], T | None], use: Callable[[T], object]) -> bool:
        plugin = open_plugin()
        if plugin is not None and not self._stop.is_set():
            use(plugin)
        return plugin is not None

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those of the last attempts. Safe from any thread."""
        return tuple(self._failures.copy().values())

    def run(self, stop: threading.Event) -> None:
        """Try every few seconds until ``stop``."""
        self._stop = stop
        while not stop.wait(AWAITED_INTERVAL / SECOND):
            self.turn()

    def turn(self) -> None:
        """Try to open each plugin that is due."""
        for table, attempt in [*self._attempts.items()]:
            if not self._retries[table].is_due(self._clock.monotonic()):
                continue
            try:
                opened = attempt()
            except Exception as error:  # noqa: BLE001 - a failing plugin must not affect others
                self._failures[table] = _open_failure(table, error)
                self._retries[table].failed(self._clock.monotonic())
                continue
            self._failures.pop(table, None)
            self._retries[table].reset()
            if opened:
                del self._attempts[table]
                self._log(f"The plugin [{table}] is open, and in use from now on.")


def source_advice(plugins: Plugins, config: Config, name: str) -> Iterator[str]:
    """A sentence for each setting of the source ``name`` that matches nothing on this host."""
    try:
        yield from plugins.sources[name].advice(config.sources[name])
    except Exception as error:  # noqa: BLE001 - the check of others continues
        yield f"[sources.{name}] cannot be checked, {_cause(error)}. {_REPORT}"


def open_exporters(
    plugins: Plugins, config: Config, context: ExporterContext
) -> OpenedPlugins[Exporter]:
    """Construct all exporters that the configuration does not turn off; none is started.

    ExporterError for an invalid setting, because an agent without its exporter is useless. Any
    other error becomes a failure of that exporter, which is awaited.
    """
    opened: dict[str, Exporter] = {}
    awaited: dict[str, Callable[[], Exporter | None]] = {}
    failures: dict[str, Failure] = {}
    for name, plugin in plugins.exporters.items():
        open_exporter = partial(plugin.open, config.exporters[name], context)
        try:
            exporter = open_exporter()
        except WattspanError:
            raise
        except Exception as error:  # noqa: BLE001 - a failing exporter must not affect others
            failures[name] = _open_failure(f"exporters.{name}", error)
            awaited[name] = open_exporter
            continue
        if exporter is not None:
            opened[name] = exporter
    return OpenedPlugins(exporters=opened, awaited=awaited, awaited_failures=failures)


def exporter_faults(plugins: Plugins, config: Config) -> Iterator[str]:
    """A sentence for each setting of an exporter that prevents its opening; none is opened."""
    for name, plugin in plugins.exporters.items():
        try:
            yield from plugin.faults(config.exporters[name])
        except Exception as error:  # noqa: BLE001 - the check of others continues
            yield f"[exporters.{name}] cannot be checked, {_cause(error)}. {_REPORT}"


def _open_failure(table: str, error: Exception) -> Failure:
    return _failure(table, f"it does not open, {_cause(error)}")


def _failure(table: str, cause: str, remedy: str = _REPORT) -> Failure:
    return Failure(table.partition(".")[2], f"[{table}]", Trouble.ABSENT, cause, remedy)
