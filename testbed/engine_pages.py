"""The Prometheus pages of emulated engines in virtual time, with the names of real ones.

``vllm`` moves its counters with each iteration that generates a token, and counts a prompt with its
first token; ``sglang`` counts prompts with each batch of them, other tokens once in so many passes;
``finish`` has the names of TensorRT-LLM, whose counters move when a request finishes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from testbed.continuous_batching import EmulatedRequest
from testbed.serving_engines import ServingEngine

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} {waiting}.0
vllm:cache_config_info{{block_size="16",engine="0"}} 1.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{model}"}} {prompt}.0
vllm:prompt_tokens_by_source_total{{engine="0",model_name="{model}",source="local_compute"}} {computed}.0
vllm:prompt_tokens_by_source_total{{engine="0",model_name="{model}",source="local_cache_hit"}} {cached}.0
vllm:prompt_tokens_cached_total{{engine="0",model_name="{model}"}} {cached}.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{model}"}} {generated}.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{model}"}} {finished}.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="{model}"}} 0.0
vllm:iteration_tokens_total_count{{engine="0",model_name="{model}"}} {iterations}.0
vllm:time_to_first_token_seconds_count{{engine="0",model_name="{model}"}} {prompts}.0
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="{model}"}} {decode_seconds:.6f}
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="{model}"}} {prefill_seconds:.6f}
"""  # noqa: E501
SGLANG = """\
sglang:realtime_tokens_total{{mode="prefill_compute",model_name="{model}",tp_rank="0"}} {batched}.0
sglang:realtime_tokens_total{{mode="prefill_cache",model_name="{model}",tp_rank="0"}} {cached}.0
sglang:realtime_tokens_total{{mode="decode",model_name="{model}",tp_rank="0"}} {logged}.0
sglang:cuda_graph_passes_total{{mode="decode_cuda_graph",model_name="{model}",tp_rank="0"}} {passes}.0
sglang:num_running_reqs{{model_name="{model}",tp_rank="0"}} {running}.0
sglang:num_requests_total{{model_name="{model}"}} {finished}.0
sglang:time_to_first_token_seconds_count{{model_name="{model}"}} {prompts}.0
sglang:inter_token_latency_seconds_count{{model_name="{model}"}} {decoded}.0
"""  # noqa: E501
FINISH = """\
trtllm_num_requests_running{{model_name="{model}"}} {running}.0
trtllm_num_requests_waiting{{model_name="{model}"}} 0.0
trtllm_prompt_tokens_total{{model_name="{model}"}} {ended_prompt}.0
trtllm_prompt_cached_tokens_total{{model_name="{model}"}} {ended_cached}.0
trtllm_generation_tokens_total{{model_name="{model}"}} {ended_generated}.0
trtllm_request_success_total{{finished_reason="length",model_name="{model}"}} {finished}.0
"""


_MOVING = ("prompt", "computed", "cached", "generated", "iterations", "prompts", "finished")
_ENDED = ("ended_prompt", "ended_cached", "ended_generated")
_SECONDS = ("decode_seconds", "prefill_seconds")
_PASSES = ("batched", "passes", "logged", "decoded")


def page(template: str, model: str, **counts: float) -> bytes:
    """A page with these counts; those that are not given are 0."""
    names = (*_MOVING, *_ENDED, *_SECONDS, *_PASSES, "running", "waiting")
    return template.format(model=model, **(dict.fromkeys(names, 0) | counts)).encode()


def joined(*bodies: bytes) -> bytes:
    """One page of the models or data-parallel parts that have these pages, each line once.

    All of them are of one template.
    """
    lines = zip(*(body.splitlines() for body in bodies), strict=True)
    return b"\n".join(dict.fromkeys(one for each in lines for one in each)) + b"\n"


def as_part(body: bytes, number: int) -> bytes:
    """The page of the data-parallel part with this number: an engine core of vLLM."""
    return body.replace(b'engine="0"', b'engine="%d"' % number)


def with_ranks(body: bytes, ranks: int) -> bytes:
    """The page of SGLang whose tensor-parallel ranks all count the same tokens."""
    found = []
    for line in body.splitlines():
        each = (line.replace(b'tp_rank="0"', b'tp_rank="%d"' % rank) for rank in range(ranks))
        found += dict.fromkeys(each)
    return b"\n".join(found) + b"\n"


@dataclass(frozen=True, slots=True)
class EngineTruth:
    """Sums since the start: joules of prompts and of generated tokens, and true tokens."""

    input: float
    output: float
    computed: int
    generated: int


class EmulatedPages:
    """The pages of an engine that has run, by the time of a reading.

    ``logged`` are the passes from one count of decode tokens to the next, as SGLang has them.
    """

    def __init__(self, engine: ServingEngine, *, logged: int = 40) -> None:
        self._model = engine.model
        done = engine.iterations
        self._begins = [each.start for each in done]
        self._ends = [each.end for each in done]
        prompts = [each.prompts for each in done]
        decoded = [each.generated - len(each.prompts) for each in done]
        passes = _sums(int(count > 0) for count in decoded)
        self._sums = {
            "generated": _sums(each.generated for each in done),
            "iterations": _sums(int(each.generated > 0) for each in done),
            "prompts": _sums(len(each) for each in prompts),
            "prompt": _sums(sum(one.prompt for one in each) for each in prompts),
            "cached": _sums(
                sum(min(one.cached, one.prompt - 1) for one in each) for each in prompts
            ),
            "finished": _sums(len(each.finished) for each in done),
            "ended_prompt": _of_finished(done, lambda one: one.prompt),
            "ended_cached": _of_finished(done, lambda one: min(one.cached, one.prompt - 1)),
            "ended_generated": _of_finished(done, lambda one: one.output),
            "decode_seconds": _sums(
                count * (each.end - each.start) for count, each in zip(decoded, done, strict=True)
            ),
            "prefill_seconds": _of_finished(done, lambda one: one.first_token - one.scheduled),
            "batched": _sums(each.computed for each in done),
            "passes": passes,
            "decoded": _sums(decoded),
            "logged": _logged(_sums(decoded), passes, logged),
        }
        boards = engine.batching.boards
        self._input = _sums(boards * each.input for each in done)
        self._energy = _sums(boards * each.energy for each in done)
        self._computed = _sums(each.computed for each in done)
        self._starts = sorted(one.scheduled for one in engine.done)

    def at(self, time: float, template: str = VLLM) -> bytes:
        """The page at a time."""
        i = bisect_right(self._ends, time)
        counts = {name: sums[i] for name, sums in self._sums.items()}
        running = bisect_right(self._starts, time) - counts["finished"]
        computed = counts["prompt"] - counts["cached"]
        return page(template, self._model, running=max(0, running), computed=computed, **counts)

    def truth(self, time: float) -> EngineTruth:
        """The sums up to a time; of an iteration with it, a part by time."""
        i = bisect_right(self._ends, time)
        prompt, whole = self._input[i], self._energy[i]
        if i < len(self._ends):
            start, end = self._begins[i], self._ends[i]
            part = max(0.0, time - start) / (end - start)
            prompt += part * (self._input[i + 1] - prompt)
            whole += part * (self._energy[i + 1] - whole)
        generated = self._sums["generated"][i]
        return EngineTruth(prompt, whole - prompt, int(self._computed[i]), int(generated))


def _sums(values) -> Sequence[float]:
    return [0, *accumulate(values)]


def _logged(tokens: Sequence[float], passes: Sequence[float], interval: int) -> Sequence[float]:
    """The tokens at the last multiple of ``interval`` passes."""
    found, last, logs = [], 0, 0
    for count, number in zip(tokens, passes, strict=True):
        if number // interval > logs:
            last, logs = count, number // interval
        found.append(last)
    return found


def _of_finished(iterations, figure) -> Sequence[float]:
    def of(finished: Sequence[EmulatedRequest]) -> float:
        return sum(figure(one) for one in finished)

    return _sums(of(each.finished) for each in iterations)
