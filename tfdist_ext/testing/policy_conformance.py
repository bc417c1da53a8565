"""Does an update policy keep what training on parameter servers relies on?"""

from __future__ import annotations

import math
import random

from tfdist_ext.ps import Policy
from tfdist_ext.testing.ledger_chaos import LedgerChaos, PolicyConformanceError, require

_MAX_SHARD = 7


def check_update_policy(
    policy: Policy,
    *,
    max_staleness: float = math.inf,
    num_runs: int = 200,
    max_workers: int = 4,
    min_workers: int = 1,
    seed: int = 0,
) -> None:
    """Runs a policy against workers that are slow, die, come back and never answer, and against failing updates.

    Pure Python: no TensorFlow, no processes, a few seconds. It checks that

    - every epoch ends when each set in flight arrives or is declared lost, also with a worker that stops for ever;
    - every batch is applied once, or dropped and counted once;
    - no worker gets two sets at once, none works on variables of the future, and the shares of a step sum to 1;
    - no applied set is staler than `max_staleness`;
    - two runs of the same events decide alike, also with other ledgers under the same policy in between.

    Args:
        policy: The policy: an object with `damping` and `rule(num_workers, too_few_workers)`, see
            `tfdist_ext.ps.Rule`.
        max_staleness: What the policy promises of the staleness of applied sets, in steps; infinity for nothing.
        num_runs: Number of random runs.
        max_workers: Largest number of workers of a run.
        min_workers: Smallest number of workers that the policy takes.
        seed: Of the first run; the others count up from it.

    Raises:
        PolicyConformanceError: A promise is broken; the message has the seed that shows it again.

    Example:
        >>> from tfdist_ext.ps import BoundedStaleness
        >>> check_update_policy(BoundedStaleness(2), max_staleness=2, num_runs=20)
    """
    for number in range(seed, seed + num_runs):
        try:
            first = _run(policy, number, min_workers, max_workers)
            _check(first, max_staleness)
            again = _run(policy, number, min_workers, max_workers)
            require(
                first.applies == again.applies,
                "The same events led to other decisions: the rule draws at random, or keeps something outside itself.",
            )
        except AssertionError as error:
            raise PolicyConformanceError(f"{policy!r} with seed={number}, num_runs=1: {error}") from error


def _run(policy: Policy, seed: int, min_workers: int, max_workers: int) -> LedgerChaos:
    source = random.Random(seed)
    num_workers = source.randint(min_workers, max_workers)
    num_shards = source.choice([num_workers, source.randint(1, 6)])
    # A worker that stops for ever is one more than the policy needs.
    stopped = [source.randrange(num_workers)] if num_workers > min_workers and source.random() < 0.3 else []
    chaos = LedgerChaos(
        policy,
        num_workers,
        [source.randint(0, _MAX_SHARD) for _ in range(num_shards)],
        seed,
        known=source.random() < 0.5,
        stopped=stopped,
        deaths=source.random() < 0.7,
        push_every_steps=source.randint(1, 2),
        requeue_dropped=source.random() < 0.5,
    )
    chaos.run_epoch(num_random=source.randint(0, 100))
    return chaos


def _check(chaos: LedgerChaos, max_staleness: float) -> None:
    chaos.check_every_batch_once()
    chaos.check_counts()
    require(
        chaos.max_staleness <= max_staleness,
        f"A set of staleness {chaos.max_staleness} was applied; the policy promises {max_staleness}.",
    )
    for apply in chaos.applies:
        total = math.fsum(one.share for one in apply.sets)
        require(abs(total - 1) < 1e-12, f"The shares of step {apply.version} sum to {total}.")
