"""Explanations of decision reasons for operators: meaning, next step, remedy.

`wattspan tune explain` prints them, and the table of
``docs/explanation/how-the-tuner-decides.md`` is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from wattspan.model import DecisionReason


class ReasonExplanation(NamedTuple):
    """``means``, ``then`` (the next automatic step) and ``do`` (a remedy, or "") are sentences."""

    means: str
    then: str
    do: str = ""


_LATER = "The tuner tries again after the dwell time, which doubles each time."
_AGAIN = "Tuning resumes when the condition ends, or after the dwell time if a cap was restored."

REASON_EXPLANATIONS: Mapping[DecisionReason, ReasonExplanation] = {
    # probing
    DecisionReason.BASELINE: ReasonExplanation(
        "The tuner observes the original setting: time of a unit of work, noise and power.",
        "The first lower setting is tried when the noise is known.",
    ),
    DecisionReason.SCREENING: ReasonExplanation(
        "The tuner compares lower settings with the original, a few pairs of blocks each.",
        "The most promising setting within the budget is certified.",
    ),
    DecisionReason.CERTIFYING: ReasonExplanation(
        "One setting is compared with the original, in alternation, until its bound is certain.",
        "The setting is held if its bound is within the budget, and abandoned if that is unlikely.",
    ),
    DecisionReason.SENTINEL: ReasonExplanation(
        "The original temporarily replaces a held setting, to renew the comparison.",
        "The setting is held again, or released immediately if it has become too slow.",
    ),
    DecisionReason.RECERTIFYING: ReasonExplanation(
        "A setting that was certified for the same program and hardware is certified again.",
        "It is held if it keeps the budget; otherwise the search starts from the beginning.",
    ),
    # holding
    DecisionReason.CERTIFIED: ReasonExplanation(
        "The setting keeps the budget at the declared confidence, and best meets the `objective`.",
        "It is occasionally compared with the original, and released when it breaks the budget.",
    ),
    # releasing
    DecisionReason.OVER_BUDGET: ReasonExplanation(
        "The job is, or probably is, slower than the budget permits. The original is restored.",
        "After the dwell time a higher setting is certified; frequent releases double the time.",
        "Check for other causes of a varying speed, or permit more with `max_slowdown`.",
    ),
    DecisionReason.CHANGED: ReasonExplanation(
        "The job's time or power per unit of work has shifted. The original is restored.",
        "The original is observed again, and then the setting is certified again or abandoned.",
    ),
    DecisionReason.PAUSED: ReasonExplanation(
        "No unit of work has ended for far longer than usual. The original is restored.",
        "Tuning resumes when units end again: the certified setting is certified again.",
    ),
    DecisionReason.ENDED: ReasonExplanation(
        "The job has ended.",
        "The certified setting is remembered for the next run of the same program.",
    ),
    DecisionReason.TAIL: ReasonExplanation(
        "More requests exceeded the required latency than its percentile permits.",
        _LATER,
        "Check `latency` and `percentile` of the job in the configuration.",
    ),
    # declining
    DecisionReason.ADVICE: ReasonExplanation(
        "The tuner only advises: no limit is written.",
        "The tuner continues to observe.",
        'Set `mode = "apply"` in `[autotune]`, or for the job alone.',
    ),
    DecisionReason.NOT_CHOSEN: ReasonExplanation(
        "The job was detected automatically, and settings are applied only to named jobs.",
        "The tuner continues to observe.",
        "Name it in `[[autotune.job]]`, or set `apply_found = true`.",
    ),
    DecisionReason.NOT_ALLOWED: ReasonExplanation(
        "The configuration does not permit tuning of its devices or groups.",
        "Nothing, until the configuration changes.",
        "Add them to `gpus` or `groups` in `[autotune]`.",
    ),
    DecisionReason.NO_SIGNAL: ReasonExplanation(
        "No unit of work was received, or the energy of the job's devices is unknown.",
        "Tuning starts when both are available.",
        "Let the job send spans, and check `service` and `span` against `wattspan top --by span`.",
    ),
    DecisionReason.BAD_WORK: ReasonExplanation(
        "The attribute that counts a unit's work is missing, zero or negative.",
        "Tuning starts when units with work arrive.",
        "Correct `work`, or leave it empty to count every span as one.",
    ),
    DecisionReason.TOO_SHORT: ReasonExplanation(
        "The job ended before a search could save more than it costs.",
        "A longer run of the same program is searched.",
    ),
    DecisionReason.TOO_NOISY: ReasonExplanation(
        "The time per unit varies too much: certification would cost more than it could save.",
        _LATER,
        "Count the work of units of different sizes with `work`, or increase `max_slowdown`.",
    ),
    DecisionReason.NOT_MONOTONE: ReasonExplanation(
        "A lower setting was clearly faster than a higher one: another factor sets the speed.",
        _LATER,
        "Look for heat, and for other work on the devices and their host.",
    ),
    DecisionReason.INERT: ReasonExplanation(
        "No permitted setting has an effect: the devices draw less than the lowest of them.",
        _LATER,
        "Permit lower settings with `floor`, or add `gpu_clock` to `knobs`.",
    ),
    DecisionReason.NO_SAVING: ReasonExplanation(
        "No setting within the budget needs less energy for the same work.",
        _LATER,
    ),
    DecisionReason.NO_ROOM: ReasonExplanation(
        "The budget, the floor or the device's range leaves no setting to try.",
        "Nothing, until one of them changes.",
        "Check `max_slowdown` and `floor`, and `floor_watts` and `fixed` in `[caps]`.",
    ),
    DecisionReason.WAITING: ReasonExplanation(
        "Another job of this host explores, and two would disturb each other.",
        "Tuning starts when the other job's exploration ends.",
    ),
    # both releasing and declining
    DecisionReason.FOREIGN_WRITER: ReasonExplanation(
        "Another program has set the device's limit. It is left unchanged.",
        "The device is not tuned while the foreign limit is in force.",
        "Find the writer (`nvidia-smi -pl`, DCGM, a scheduler); see `wattspan caps status`.",
    ),
    DecisionReason.THROTTLED: ReasonExplanation(
        "The device throttles itself, for example for heat, so a comparison would be invalid.",
        _AGAIN,
        "Check cooling and power; `wattspan top` names the reason beside the device.",
    ),
    DecisionReason.SHARED: ReasonExplanation(
        "Another tenant of the device, which a cap would affect too, does not agree.",
        _AGAIN,
        "Give every tenant a `[[autotune.job]]`, or the device to one of them.",
    ),
    DecisionReason.MIG: ReasonExplanation(
        "The device is split into instances (MIG), and a cap would affect all of them.",
        _AGAIN,
    ),
    DecisionReason.NO_PERMISSION: ReasonExplanation(
        "The capper has no permission to write limits on this host.",
        "The tuner continues to advise.",
        "`wattspan doctor` names the missing right.",
    ),
    DecisionReason.NO_CAPPER: ReasonExplanation(
        "The capper does not answer; when it ended, the original settings were restored.",
        "The tuner continues to advise, and starts tuning again when the capper answers.",
        "Start `wattspan capper`, or let the agent start it: `capper` in `[caps]`.",
    ),
    DecisionReason.LOST_DEVICE: ReasonExplanation(
        "The device does not answer.",
        _AGAIN,
        "See the kernel's log; a GPU that fell off its bus needs a reset or a reboot.",
    ),
    DecisionReason.NO_DEVICE: ReasonExplanation(
        "The job uses no device with a tunable knob.",
        "Tuning starts when it uses one.",
        "`wattspan doctor` lists the knobs of this host; `knobs` in `[autotune]` selects them.",
    ),
    DecisionReason.HELD: ReasonExplanation(
        "Another holder has the device's cap: another job, or the operator.",
        _AGAIN,
        "`wattspan caps status` names the holder.",
    ),
}
"""For every reason."""


def markdown() -> Iterator[str]:
    """Lines of the table of all reasons."""
    yield "| reason | meaning | next | remedy |"
    yield "|---|---|---|---|"
    for reason in DecisionReason:
        meaning = REASON_EXPLANATIONS[reason]
        yield f"| `{reason}` | {meaning.means} | {meaning.then} | {meaning.do or 'none'} |"
