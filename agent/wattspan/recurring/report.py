"""The state of a recurring job as plain facts, for the API and the command line. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from wattspan.recurring.jobs import (
    JobRuns,
    Prospect,
    RecurringJobTerms,
    SearchVerdict,
    mean_energies,
    prospect,
    trials_of,
)
from wattspan.recurring.search import TrialOutcome, is_pruning, mean_costs


def job_facts(job: JobRuns) -> dict[str, Any]:
    """The terms of a job, its runs by batch size, and the worth of the search."""
    terms, runs = job.terms, job.runs
    policy, trials = terms.policy, trials_of(terms, runs)
    costs, found = mean_costs(policy, trials), prospect(terms, runs)
    energies = mean_energies(terms, runs)
    tried = Counter(one.batch_size for one in trials)
    lost = Counter(one.batch_size for one in trials if one.outcome is TrialOutcome.LOST)
    running = Counter(one.batch_size for one in runs if one.outcome is None)
    reached = Counter(one.batch_size for one in trials if one.outcome is TrialOutcome.CONVERGED)
    return {
        "job": terms.name,
        "gpus": job.gpus,
        "terms": terms_facts(terms),
        "phase": "pruning" if is_pruning(policy, trials) else "sampling",
        "runs": len(runs),
        "running": sum(one.outcome is None for one in runs),
        "newest_run": max((one.key for one in runs if one.outcome is None), default=None),
        "sizes": [
            {
                "batch_size": size,
                "runs": tried[size],
                "reached": reached[size],
                "running": running[size],
                "lost": lost[size],
                "cost_joules": costs.get(size),
                "energy_joules": energies.get(size),
            }
            for size in policy.batch_sizes
        ],
        "verdict": found.verdict,
        "best": found.best,
        "saving": found.saving,
        "spent_joules": found.spent,
        "break_even_runs": found.break_even,
        "sentence": verdict_sentence(terms, found),
    }


def terms_facts(terms: RecurringJobTerms) -> dict[str, Any]:
    """The terms with the names that ``BatchSizeOptimizer`` gives them."""
    policy = terms.policy
    return {
        "batch_sizes": list(policy.batch_sizes),
        "default_batch_size": policy.default,
        "target_metric": terms.target_metric,
        "higher_is_better_metric": terms.higher_is_better,
        "max_epochs": terms.max_epochs,
        "eta_knob": terms.eta,
        "beta_knob": policy.beta,
        "num_pruning_rounds": policy.rounds,
        "window_size": policy.window,
        "seed": policy.seed,
    }


def verdict_sentence(terms: RecurringJobTerms, found: Prospect) -> str:
    """The worth of the search in one sentence."""
    default = terms.policy.default
    unfinished = "" if found.complete else "; the trials of some sizes are not finished yet"
    match found.verdict:
        case SearchVerdict.UNKNOWN:
            return "No run has reached the target metric yet."
        case SearchVerdict.DEFAULT_MISSES:
            return (
                f"The default batch size {default} has not reached the target metric; the best "
                f"known size is {found.best}{unfinished}."
            )
        case SearchVerdict.NOT_WORTH:
            return (
                f"No size is clearly cheaper than the default {default}: a search is not worth "
                f"its cost{unfinished}."
            )
        case SearchVerdict.PAID | SearchVerdict.PAYS:
            return _saving_sentence(terms, found, unfinished)


def _saving_sentence(terms: RecurringJobTerms, found: Prospect, unfinished: str) -> str:
    when = "the search has paid for itself"
    if found.verdict is SearchVerdict.PAYS:
        runs = f"{found.break_even} more run{'s' if found.break_even != 1 else ''}"
        when = f"the search pays for itself after about {runs}"
    return (
        f"Batch size {found.best} costs {found.saving:.0%} less than the default "
        f"{terms.policy.default}; {when}{unfinished}."
    )
