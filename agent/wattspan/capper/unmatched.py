"""Settings of caps that match no device of this host now. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from wattspan.capper.devices import matches_device
from wattspan.capper.planner import is_power_knob
from wattspan.config import CapsSettings
from wattspan.model import Knob, KnobState
from wattspan.model.settings import quoted


def unmatched_settings(
    caps: CapsSettings, states: Collection[KnobState], tunable: Collection[str] = ()
) -> Iterator[str]:
    """A sentence for each name without a device, and for a budget that limits nothing.

    ``states`` are those of all knobs that can be read; ``tunable`` is ``[autotune] gpus``.
    """
    for one in caps.fixed:
        having = [state for state in states if state.key.knob is one.knob]
        if is_power_knob(one.knob) and not any(matches_device([one.device], s) for s in having):
            name = quoted(one.device)
            yield f"[[caps.fixed]] device = {name} matches nothing: {_having(one.knob, having)}."
    powered = [state for state in states if is_power_knob(state.key.knob)]
    for ranked in caps.priority:
        if not any(matches_device([ranked.device], state) for state in powered):
            yield (
                f"[[caps.priority]] device = {quoted(ranked.device)} matches nothing:"
                f" {_having(None, powered)}."
            )
    if (caps.budget_watts or caps.budget_file) and not powered:
        name = "budget_watts" if caps.budget_watts else "budget_file"
        yield (
            f"[caps] {name} limits nothing: no device here has a power limit that can be set, as is"
            " usual for laptops and virtual machines."
        )
    boards = [state for state in states if state.key.knob is not Knob.CPU_POWER]
    for name in tunable:
        if not any(matches_device([name], state) for state in boards):
            yield f"[autotune] gpus: {quoted(name)} matches nothing: {_having(None, boards)}."


def _having(knob: Knob | None, states: Collection[KnobState]) -> str:
    """The devices that a name could mean."""
    kind = "knob" if knob is None else str(knob)
    if not states:
        return f"no device here has a {kind} that can be set"
    names = {state.key.device: f"{state.name} ({', '.join(state.aliases)})" for state in states}
    return f"the devices with a {kind} are {'; '.join(sorted(names.values()))}"
