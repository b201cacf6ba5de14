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
_AGAIN = (
    "Tuning resumes when the condition ends; after the dwell time, if a cap had to be restored."
)

REASON_EXPLANATIONS: Mapping[DecisionReason, ReasonExplanation] = {
    # probing
    DecisionReason.BASELINE: ReasonExplanation(
        "The tuner observes the original setting: the time of a unit of work, its variation, and "
        "the power of the devices.",
        "The first lower setting is tried when the noise is known.",
    ),
    DecisionReason.SCREENING: ReasonExplanation(
        "The tuner tries lower settings in sequence, from just above the present power downwards, "
        "each for a few pairs: one block at the setting, one at the original.",
        "Screening stops before the budget is reached; the most promising setting is then "
        "certified.",
    ),
    DecisionReason.CERTIFYING: ReasonExplanation(
        "One setting is compared with the original, in alternation, until its bound is certain.",
        "The setting is held once its bound is within the budget, and abandoned if that becomes "
        "unlikely or too expensive.",
    ),
    DecisionReason.SENTINEL: ReasonExplanation(
        "The original temporarily replaces a held setting, to renew the comparison.",
        "The setting is held again, or released immediately if it has become too slow.",
    ),
    DecisionReason.RECERTIFYING: ReasonExplanation(
        "A setting that was certified for the same program on the same hardware is certified "
        "again.",
        "It is held if it keeps the budget; otherwise the search starts from the beginning.",
    ),
    # holding
    DecisionReason.CERTIFIED: ReasonExplanation(
        "The setting keeps the budget at the declared confidence, and needs the least energy, or "
        "best meets the `objective`, of those that do.",
        "It is occasionally compared with the original, and released immediately when it no "
        "longer keeps the budget.",
    ),
    # releasing
    DecisionReason.OVER_BUDGET: ReasonExplanation(
        "The job is slower than the budget permits, or probably is. The original is restored.",
        "After the dwell time a setting nearer to the original is certified; the time doubles "
        "with each release within an hour.",
        "If it happens often, check for other causes of a varying speed, or permit more with "
        "`max_slowdown`.",
    ),
    DecisionReason.CHANGED: ReasonExplanation(
        "The job has changed: its time per unit of work or its power has shifted permanently. "
        "The original is restored.",
        "The original is observed again, and then the setting is certified again or abandoned.",
    ),
    DecisionReason.PAUSED: ReasonExplanation(
        "No unit of work has ended for far longer than usual, so the effect of a cap on speed is "
        "unknown. The original is restored.",
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
        "No unit of work was received, so the effect of a cap on speed is unknown; or the energy "
        "of its devices is unknown.",
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
        "The time per unit varies so much that certification would cost more than could be saved.",
        _LATER,
        "If units differ in size, count their work with `work`; otherwise permit more with "
        "`max_slowdown`.",
    ),
    DecisionReason.NOT_MONOTONE: ReasonExplanation(
        "A lower setting was clearly faster than a higher one, so another factor determines the "
        "speed.",
        _LATER,
        "Look for heat, and for other work on the devices and their host.",
    ),
    DecisionReason.INERT: ReasonExplanation(
        "No permitted setting has an effect: the devices draw less than the lowest of them.",
        _LATER,
        "Permit lower ones with `floor`, or add `gpu_clock` to `knobs`: clocks save energy where "
        "caps have no effect.",
    ),
    DecisionReason.NO_SAVING: ReasonExplanation(
        "No setting within the budget needs less energy for the same work.",
        _LATER,
    ),
    DecisionReason.NO_ROOM: ReasonExplanation(
        "The budget, the floor or the device's range leaves no setting to try.",
        "Nothing, until one of them changes.",
        "Check `max_slowdown` and `floor` in `[autotune]`, and `floor_watts` and `fixed` in "
        "`[caps]`.",
    ),
    DecisionReason.WAITING: ReasonExplanation(
        "Another job of this host explores, and two would disturb each other.",
        "Tuning starts when the other job's exploration ends.",
    ),
    # both releasing and declining
    DecisionReason.FOREIGN_WRITER: ReasonExplanation(
        "Another program has set the device's limit. It is left unchanged.",
        "The device is not tuned while the foreign limit is in force.",
        "Find the writer: `nvidia-smi -pl`, DCGM, a scheduler's prolog, another tuner. Then see "
        "`wattspan caps status`.",
    ),
    DecisionReason.THROTTLED: ReasonExplanation(
        "The device throttles itself, for example for heat or a power brake, so a comparison "
        "would be invalid.",
        _AGAIN,
        "Check cooling and power; `wattspan top` names the reason beside the device.",
    ),
    DecisionReason.SHARED: ReasonExplanation(
        "Another tenant of the device sends no signal or does not agree, and a cap would affect "
        "it too.",
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
