"""The conformance suite passes the package's policies, and finds what is wrong with bad ones."""

import dataclasses
import random

import pytest

from tfdist_ext.ps import Asynchronous, BoundedStaleness, FreeRule, InverseStaleness, Status, Synchronous
from tfdist_ext.testing import PolicyConformanceError, check_update_policy


@pytest.mark.parametrize(
    ("policy", "promise", "min_workers"),
    [
        (Synchronous(), 0, 1),
        (Synchronous(num_backup_workers=1), 0, 2),
        (Synchronous(num_backup_workers=1, max_staleness=2), 2, 2),
        (BoundedStaleness(0), 0, 1),
        (BoundedStaleness(3), 3, 1),
        (BoundedStaleness(2, late="drop"), 2, 1),
        (BoundedStaleness(1, clock="worker"), float("inf"), 1),
        (BoundedStaleness(4, damping=InverseStaleness()), 4, 1),
        (Asynchronous(), float("inf"), 1),
    ],
    ids=str,
)
def test_the_policies_of_the_package_conform(policy, promise, min_workers):
    check_update_policy(policy, max_staleness=promise, min_workers=min_workers, num_runs=60)


@dataclasses.dataclass(frozen=True)
class Custom:
    """A policy that is carried out by any rule."""

    make_rule: object
    damping: object = None

    def rule(self, num_workers, too_few_workers):
        return self.make_rule()


class NeverApplies(FreeRule):
    def next_apply(self, state):
        return []


class AppliesPairsOnly(FreeRule):
    """Forgets the last set of an odd number."""

    def next_apply(self, state):
        found = state.with_status(Status.ADMITTED)
        return found[:2] if len(found) >= 2 else []


class DrawsAtRandom(FreeRule):
    source = random.Random(1)

    def next_apply(self, state):
        found = state.with_status(Status.ADMITTED)
        return [self.source.choice(found)] if found else []


class SaysNothing(FreeRule):
    def waiting_for(self, state):
        return ""


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (NeverApplies, "Nothing is in flight, and nothing starts or is applied"),
        (AppliesPairsOnly, "Nothing is in flight, and nothing starts or is applied"),
        (DrawsAtRandom, "The same events led to other decisions"),
        (SaysNothing, "`waiting_for` says nothing"),
    ],
)
def test_a_broken_promise_is_named_with_the_seed(rule, complaint):
    with pytest.raises(PolicyConformanceError, match=rf"with seed=\d+, num_runs=1: .*{complaint}") as caught:
        check_update_policy(Custom(rule), num_runs=300)
    # The seed of the message alone shows it again.
    seed = int(str(caught.value).split("seed=")[1].split(",")[0])
    if rule is not DrawsAtRandom:
        with pytest.raises(PolicyConformanceError, match=complaint):
            check_update_policy(Custom(rule), seed=seed, num_runs=1)


def test_a_bound_that_is_not_kept_is_found():
    with pytest.raises(
        PolicyConformanceError, match="A set of staleness [2-9] was applied; the policy promises 1"
    ):
        check_update_policy(Asynchronous(), max_staleness=1, num_runs=300)
