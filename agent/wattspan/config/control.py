"""What the operator allows: how much slower work may become, and which limits hold anyway."""

from __future__ import annotations

from typing import Annotated, Literal

from wattspan.model import Knob
from wattspan.model.settings import Duration, Size, Table, about

BoolOrAuto = bool | Literal["auto"]


class TunedJobSettings(Table, frozen=True):
    """One job whose speed is watched: which spans are its units of work.

    What is left empty matches everything; `service` or `span` must be given.
    """

    service: Annotated[str, about("The `service.name` of its spans.")] = ""
    span: Annotated[str, about("The name of the span that is one unit of its work.")] = ""
    work: Annotated[
        str,
        about(
            "The span attribute that counts the work of a unit, such as tokens or samples, if "
            'it varies; "tokens" are the `gen_ai.usage.*` tokens. "" counts each span as one.'
        ),
    ] = ""
    compute: Annotated[
        str,
        about(
            "The span in which a rank of a synchronous job computes itself; with it, ranks that "
            "wait for others may be capped lower."
        ),
    ] = ""
    kind: Annotated[
        Literal["auto", "steps", "requests"],
        about("Whether units come one after the other or side by side."),
    ] = "auto"
    latency: Annotated[
        Duration,
        about(
            "For requests: what the `percentile` must stay within; 0 takes it from the original."
        ),
    ] = Duration(0)
    percentile: Annotated[
        float,
        about(
            "For requests: the part that must be within `latency`.",
            least=0.5,
            most=0.9999,
            hint="0.99 is the 99th percentile",
        ),
    ] = 0.99
    max_slowdown: Annotated[
        float | None,
        about(
            "This job's own budget; without it, that of `[autotune]`.",
            least=0,
            most=1,
            hint="0.05 is 5 %",
        ),
    ] = None
    mode: Annotated[
        Literal["", "advise", "apply"], about("This job's own mode; without it, `[autotune]`'s.")
    ] = ""

    def __post_init__(self) -> None:
        if not self.service and not self.span:
            raise ValueError("a job needs `service` or `span`, by which its spans are known")


class AutotuneSettings(Table, frozen=True):
    """The tuner: how much slower work may become, and what may be turned to save energy."""

    mode: Annotated[
        Literal["off", "advise", "apply"],
        about("`advise` says what it would do; `apply` does it, for the jobs named below."),
    ] = "off"
    max_slowdown: Annotated[
        float,
        about(
            "How much slower a job may become over its whole run: 0.05 is 5 %.",
            least=0,
            most=1,
            hint="0.05 is 5 %",
        ),
    ] = 0.05
    confidence: Annotated[
        float,
        about(
            "How sure it must be that a setting keeps the budget.",
            least=0.5,
            most=0.9999,
            hint="0.95 is 95 %",
        ),
    ] = 0.95
    objective: Annotated[
        Literal["energy", "cost", "time"],
        about("What is made small among the settings that keep the budget."),
    ] = "energy"
    eta: Annotated[
        float,
        about("With `cost`: the weight of energy; the rest is that of time.", least=0, most=1),
    ] = 0.5
    knobs: Annotated[
        tuple[Knob, ...],
        about(
            "What may be turned, one after the other. `gpu_clock` cannot be read back from the "
            "device, so it is reset, not restored."
        ),
    ] = (Knob.GPU_POWER,)
    floor: Annotated[
        float,
        about(
            "The lowest cap, as a part of the device's default limit.",
            least=0,
            most=1,
            hint="0.6 is 60 %",
        ),
    ] = 0.6
    gpus: Annotated[
        tuple[str, ...],
        about("UUIDs or indices of the GPUs that may be capped; none named: all."),
    ] = ()
    groups: Annotated[
        tuple[str, ...],
        about(
            "Names of the groups whose jobs may be tuned, each as `name` or `kind:name`, such as a "
            "container, a pod, a unit or `user:ann`; none named: all."
        ),
    ] = ()
    apply_found: Annotated[
        bool,
        about("Whether jobs that were found by themselves, from spans like steps, are applied to."),
    ] = False
    job: Annotated[tuple[TunedJobSettings, ...], about("The jobs, `[[autotune.job]]`.")] = ()
    block: Annotated[
        Duration,
        about("How long a setting is held for one look at it, at least.", least="100ms", most="1h"),
    ] = Duration.parse("5s")
    block_units: Annotated[
        int, about("And for how many units of work, at least.", least=5, most=100_000)
    ] = 20
    settle: Annotated[
        Duration,
        about("What is not counted after each change, at least.", least="0s", most="10m"),
    ] = Duration.parse("2s")
    settle_units: Annotated[
        int, about("And how many units of work, at least.", least=0, most=10_000)
    ] = 8
    dwell: Annotated[
        Duration, about("The least time between two searches.", least="1s", most="30d")
    ] = Duration.parse("10m")


class FixedCapSettings(Table, frozen=True):
    """One cap that the operator wants whether or not anything is tuned."""

    device: Annotated[str, about('A GPU\'s UUID or index, a zone such as "intel-rapl:0", or "*".')]
    watts: Annotated[int, about("What it is allowed at most.", least=1, most=100_000)]
    knob: Annotated[Knob, about("`gpu_power` or `cpu_power`.")] = Knob.GPU_POWER


class PrioritySettings(Table, frozen=True):
    """How early a device is cut when the host's budget does not do for all."""

    device: Annotated[str, about("A GPU's UUID or index, or a zone.")]
    priority: Annotated[int, about("The lower it is, the earlier.", least=0, most=1000)] = 100


class CapsSettings(Table, frozen=True):
    """Limits on power, and the process that alone may write them: `wattspan capper`."""

    capper: Annotated[
        BoolOrAuto,
        about(
            "Whether `wattspan run` starts a capper where none answers and caps are wanted; "
            "`auto`: if it has the right to write limits."
        ),
    ] = "auto"
    users: Annotated[
        tuple[str, ...],
        about("Users whose processes may ask the capper, beside root and its own."),
    ] = ("wattspan",)
    ceiling_users: Annotated[
        tuple[str, ...],
        about(
            "Users who, beside root, may ask the capper and may set a ceiling for the host, on its "
            "socket or as owners of `budget_file`; being in `users` is not enough for that."
        ),
    ] = ()
    lease: Annotated[
        Duration,
        about("How long a cap outlives the last sign of its tuner.", least="1s", most="10m"),
    ] = Duration.parse("10s")
    largest_step: Annotated[
        float,
        about(
            "How far a cap goes down at once, as a part of the default limit.", least=0.01, most=1
        ),
    ] = 0.25
    floor_watts: Annotated[
        int,
        about("No cap of any sort goes below this; the hardware's minimum holds anyway.", least=0),
    ] = 0
    fixed: Annotated[
        tuple[FixedCapSettings, ...], about("Caps without tuning, `[[caps.fixed]]`.")
    ] = ()
    budget_watts: Annotated[
        int,
        about(
            "A hard ceiling over all devices that can be capped, shared by priority; 0 is none.",
            least=0,
            most=1_000_000,
        ),
    ] = 0
    reserve_watts: Annotated[
        int,
        about("What of that budget is kept for what cannot be capped.", least=0, most=1_000_000),
    ] = 0
    budget_file: Annotated[
        str,
        about(
            'A file in which somebody else writes the ceiling: `watts = 1200`, `ttl = "1h"`; "" '
            "for none. Its owner is root, the capper's user or one of `ceiling_users`, and nobody "
            "else may write it. If its writer is lost, the last ceiling stays until its time is up."
        ),
    ] = ""
    priority: Annotated[
        tuple[PrioritySettings, ...], about("Who gives way first, `[[caps.priority]]`.")
    ] = ()
    log_size: Annotated[
        Size,
        about(
            "Half of what the record of writes may take, in all of its files together.",
            least="64KiB",
        ),
    ] = Size.parse("4MiB")
