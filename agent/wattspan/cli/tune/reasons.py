"""What each reason of a decision means to an operator.

`wattspan tune explain` says it, and the table of ``docs/explanation/how-the-tuner-decides.md`` is
made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from wattspan.model import DecisionReason


class ReasonExplanation(NamedTuple):
    """``means`` and ``then``, what follows by itself, are sentences; ``do`` is "" for nothing."""

    means: str
    then: str
    do: str = ""


_LATER = "It is looked at anew after the dwell time, which doubles each time."
_AGAIN = "It goes on when that is over; after the dwell time, if a cap had to be given back."

REASON_EXPLANATIONS: Mapping[DecisionReason, ReasonExplanation] = {
    # probing
    DecisionReason.BASELINE: ReasonExplanation(
        "The original setting is watched: how long a unit of work takes, how much that varies, "
        "what the devices draw.",
        "The first lower setting is tried when the noise is known.",
    ),
    DecisionReason.SCREENING: ReasonExplanation(
        "Lower settings are tried one after the other, from just above the draw downwards, each "
        "for a few pairs of looks: one at the setting, one at the original.",
        "It stops before the budget is reached; the most promising setting is then proved.",
    ),
    DecisionReason.CERTIFYING: ReasonExplanation(
        "One setting is compared with the original, turn and turn about, until it is sure.",
        "The setting is held once its bound is within the budget, and given up if that becomes "
        "unlikely or too dear.",
    ),
    DecisionReason.SENTINEL: ReasonExplanation(
        "A held setting makes way for the original for a moment, to see whether the comparison "
        "still holds.",
        "The setting is held again, or given up at once if it has become too slow.",
    ),
    DecisionReason.RECERTIFYING: ReasonExplanation(
        "A setting that was proved for the same program on the same hardware is proved anew.",
        "It is held if it keeps the budget; otherwise the search begins from the start.",
    ),
    # holding
    DecisionReason.CERTIFIED: ReasonExplanation(
        "The setting keeps the budget at the declared confidence, and needs the least energy, or "
        "whatever `objective` says, of those that do.",
        "It is compared with the original now and then, and given up at once when it does not "
        "hold any more.",
    ),
    # releasing
    DecisionReason.OVER_BUDGET: ReasonExplanation(
        "The job is slower than the budget allows, or probably is. The original is back.",
        "After the dwell time a setting nearer to the original is proved; the time doubles with "
        "each release within an hour.",
        "If it happens often, see whether the job's speed varies by itself, or allow more with "
        "`max_slowdown`.",
    ),
    DecisionReason.BUDGET_SPENT: ReasonExplanation(
        "The run has lost all the time that the budget allows so far, what was lost by learning "
        "included. The original is back.",
        "The allowance grows while the job works at full speed; then tuning goes on.",
    ),
    DecisionReason.CHANGED: ReasonExplanation(
        "The job is not what it was: its time per unit of work or its draw has shifted and stayed "
        "so. The original is back.",
        "The original is watched anew, and then the setting is proved again or given up.",
    ),
    DecisionReason.PAUSED: ReasonExplanation(
        "No unit of work has ended for far longer than usual, so nothing could tell whether a cap "
        "slows the job down. The original is back.",
        "It goes on when units end again: what was certified is proved anew.",
    ),
    DecisionReason.ENDED: ReasonExplanation(
        "The job is gone.",
        "What was certified is remembered for the next run of the same program.",
    ),
    DecisionReason.TAIL: ReasonExplanation(
        "More requests were slower than the latency that must hold than its percentile allows.",
        _LATER,
        "Check `latency` and `percentile` of the job in the configuration.",
    ),
    # declining
    DecisionReason.ADVICE: ReasonExplanation(
        "Only advice was asked for: nothing is turned.",
        "It goes on watching.",
        'Set `mode = "apply"` in `[autotune]`, or for the job alone.',
    ),
    DecisionReason.NOT_CHOSEN: ReasonExplanation(
        "The job was found by itself, and only jobs that are named are applied to.",
        "It goes on watching.",
        "Name it in `[[autotune.job]]`, or set `apply_found = true`.",
    ),
    DecisionReason.NOT_ALLOWED: ReasonExplanation(
        "Its devices or groups are not among those that may be tuned.",
        "Nothing, until the configuration says otherwise.",
        "Add them to `gpus` or `groups` in `[autotune]`.",
    ),
    DecisionReason.NO_SIGNAL: ReasonExplanation(
        "No unit of work was seen, so nothing could tell whether a cap slows the job down; or the "
        "energy of its devices is not known.",
        "It begins when both come.",
        "Let the job send spans, and check `service` and `span` against `wattspan top --by span`.",
    ),
    DecisionReason.BAD_WORK: ReasonExplanation(
        "The attribute that counts a unit's work is missing, zero or negative.",
        "It begins when units with work in them come.",
        "Correct `work`, or leave it empty to count every span as one.",
    ),
    DecisionReason.LYING_SIGNAL: ReasonExplanation(
        "Units are as long as ever and yet fewer end: the time passes outside of them.",
        _LATER,
        "Let the span cover the whole unit of work, waiting included.",
    ),
    DecisionReason.TOO_SHORT: ReasonExplanation(
        "The job ended before a search could pay for itself.",
        "A longer run of the same program is searched.",
    ),
    DecisionReason.TOO_NOISY: ReasonExplanation(
        "The time per unit varies so much that to be sure would cost more than could be saved.",
        _LATER,
        "If units differ in size, count their work with `work`; else allow more with "
        "`max_slowdown`.",
    ),
    DecisionReason.NOT_MONOTONE: ReasonExplanation(
        "A lower setting was clearly faster than a higher one, so something else decides the "
        "speed.",
        _LATER,
        "Look for heat, and for other work on the devices and their host.",
    ),
    DecisionReason.INERT: ReasonExplanation(
        "No allowed setting changes anything: the devices draw less than the lowest of them.",
        _LATER,
        "Allow lower ones with `floor`, or add `gpu_clock` to `knobs`: clocks save where caps do "
        "not bind.",
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
        "It begins when the other is done.",
    ),
    DecisionReason.BACKING_OFF: ReasonExplanation(
        "Settings had to be released too often of late.",
        "It is tried again after a pause, which doubles each time.",
    ),
    # both releasing and declining
    DecisionReason.FOREIGN_WRITER: ReasonExplanation(
        "Somebody else has set the device's limit since. It is left as they set it.",
        "The device is not touched while that is so.",
        "Find out who: `nvidia-smi -pl`, DCGM, a scheduler's prolog, another tuner. Then see "
        "`wattspan caps status`.",
    ),
    DecisionReason.THROTTLED: ReasonExplanation(
        "The device slows down for reasons of its own, such as heat or a power brake, so a "
        "comparison would say nothing.",
        _AGAIN,
        "See to cooling and power; `wattspan top` names the reason beside the device.",
    ),
    DecisionReason.SHARED: ReasonExplanation(
        "Another tenant of the device sends no signal or does not agree, and a cap would hit it "
        "too.",
        _AGAIN,
        "Give every tenant a `[[autotune.job]]`, or the device to one of them.",
    ),
    DecisionReason.MIG: ReasonExplanation(
        "The device is split into instances (MIG), and a cap would hit all of them.",
        _AGAIN,
    ),
    DecisionReason.PROFILE: ReasonExplanation(
        "A power profile of the vendor's is in force and changes clocks beneath a cap.",
        _AGAIN,
        "Clear the profile, or leave the device to it.",
    ),
    DecisionReason.NO_PERMISSION: ReasonExplanation(
        "Limits may not be written here.",
        "Advice goes on.",
        "`wattspan doctor` says which right is missing.",
    ),
    DecisionReason.NO_CAPPER: ReasonExplanation(
        "The process that alone may write limits does not answer; when it ended, the original "
        "settings came back.",
        "Advice goes on, and tuning begins anew when it answers.",
        "Start `wattspan capper`, or let the agent start it: `capper` in `[caps]`.",
    ),
    DecisionReason.LOST_DEVICE: ReasonExplanation(
        "The device does not answer.",
        _AGAIN,
        "See the kernel's log; a GPU that fell off its bus needs a reset or a reboot.",
    ),
    DecisionReason.NO_DEVICE: ReasonExplanation(
        "The job uses no device that can be turned.",
        "It begins when it uses one.",
        "`wattspan doctor` lists the knobs of this host; `knobs` in `[autotune]` chooses.",
    ),
    DecisionReason.HELD: ReasonExplanation(
        "Somebody else holds the device's cap: another job, or the operator.",
        _AGAIN,
        "`wattspan caps status` says who.",
    ),
}
"""Every reason; a test sees to it that none is missing."""


def markdown() -> Iterator[str]:
    """The table of all reasons, line by line."""
    yield "| reason | what it means | what follows | what you can do |"
    yield "|---|---|---|---|"
    for reason in DecisionReason:
        meaning = REASON_EXPLANATIONS[reason]
        yield f"| `{reason}` | {meaning.means} | {meaning.then} | {meaning.do or 'nothing'} |"
