"""The ``rapl`` source plugin: CPU and memory counters by the reader of choice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from wattspan.model import MILLISECOND
from wattspan.ports import CounterSource, SourceContext, SourceError, SourcePlugin
from wattspan.settings import Table, about
from wattspan.sources.powercap import PowercapSource
from wattspan.sources.powercap_failures import LOAD
from wattspan.sources.powercap_scan import CLASS, scan


class RaplSettings(Table, frozen=True):
    """Energy counters of CPU packages and memory (RAPL)."""

    enabled: Annotated[
        bool | Literal["auto"],
        about("Whether to read them. `auto`: if there are any; `true`: or do not start at all."),
    ] = "auto"
    reader: Annotated[
        Literal["powercap", "pyrapl"],
        about("Who reads them: the agent itself, or the pyRAPL library, which sees less."),
    ] = "powercap"
    sysfs: Annotated[str, about("Where sysfs is mounted; in a container, where the host's is.")] = (
        "/sys"
    )


def open_rapl(settings: RaplSettings, context: SourceContext) -> CounterSource | None:
    """The source, also where its counters are denied or masked: its health then says so.

    None where nothing is here and ``enabled`` leaves it open. SourceError where it was asked
    for and nothing is here, or pyRAPL refuses the host.
    """
    if settings.enabled is False:
        return None
    sysfs = context.sysfs or Path(settings.sysfs)
    found = scan(sysfs)
    if not found.zones and not found.masked:
        if settings.enabled is True:
            raise SourceError(
                f"Cannot read CPU energy counters: no zone counts energy under {sysfs / CLASS}. "
                f'{LOAD} With enabled = "auto" the agent does without.'
            )
        return None
    if settings.reader == "powercap":
        return PowercapSource(
            sysfs,
            context.clock,
            emulated=context.emulated,
            resolution=context.resolution or MILLISECOND,
        )
    return _open_pyrapl(settings, context, sysfs)


def _open_pyrapl(settings: RaplSettings, context: SourceContext, sysfs: Path) -> CounterSource:
    # Imported only when chosen: an agent that does not use the library does not carry it.
    from wattspan.sources.pyrapl import PyRaplSource
    from wattspan.sources.pyrapl_library import PyRaplError

    source = PyRaplSource(
        sysfs,
        context.clock,
        emulated=context.emulated,
        resolution=context.resolution or MILLISECOND,
    )
    if settings.enabled is True:
        try:
            source.open()
        except PyRaplError as error:
            raise SourceError(
                f"Cannot read CPU energy counters through pyRAPL: {error}. "
                'Set reader = "powercap" in [sources.rapl].'
            ) from None
    return source


plugin = SourcePlugin(settings=RaplSettings, open=open_rapl)
