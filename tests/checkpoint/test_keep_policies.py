"""Which checkpoints are kept: values by hand, and what holds for every policy."""

import math

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.checkpoint.keep_policies import BestN, KeepUnion, LatestN
from tfdist_ext.checkpoint.manifest import CheckpointRecord, Manifest


def record(step, attempt="a", **metrics):
    manifest = Manifest(step=step, attempt=attempt, metrics=metrics)
    return CheckpointRecord(step=step, path=f"checkpoint-{step}", attempt=attempt, manifest=manifest)


def unreadable(step):
    return CheckpointRecord(step=step, path="x", attempt="a", problem="the manifest is torn")


LOSSES = [
    record(step, val_loss=loss) for step, loss in ((10, 0.9), (20, 0.3), (30, 0.5), (40, 0.3), (50, 0.8))
]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LatestN(1), {50}),
        (LatestN(3), {30, 40, 50}),
        (LatestN(9), {10, 20, 30, 40, 50}),
        # 0.3 twice: the newer one is the better. 50 is the newest.
        (BestN("val_loss", 1), {40, 50}),
        (BestN("val_loss", 2), {20, 40, 50}),
        (BestN("val_loss", 3), {20, 30, 40, 50}),
        (BestN("val_loss", 2, mode="max"), {10, 50}),
        (LatestN(2) | BestN("val_loss", 2), {20, 40, 50}),
        (BestN("no_such_metric", 3), {50}),
    ],
)
def test_kept_steps(policy, expected):
    assert policy.keeps(LOSSES) == expected


def test_what_has_no_value_is_never_the_best():
    records = [record(1, auc=0.1), record(2, auc=math.nan), record(3), record(4, loss=9.0)]
    assert BestN("auc", 3).keeps(records) == {1, 4}
    # An infinite loss is a value, the worst one.
    assert BestN("loss", 1).keeps([record(1, loss=math.inf), record(2, loss=1.0), record(3)]) == {2, 3}


@pytest.mark.parametrize(
    ("name", "is_max"),
    [
        ("val_accuracy", True),
        ("sparse_categorical_accuracy", True),
        ("Precision_at_1", True),
        ("val_auc_1", True),
        ("f1_score", True),
        ("recall", True),
        ("loss", False),
        ("val_mean_squared_error", False),
        ("mae", False),
        ("accuracy_loss", False),
        ("layer2_mse", False),
    ],
)
def test_the_better_direction_is_in_the_name(name, is_max):
    assert BestN(name, 1).is_max == is_max
    assert not BestN(name, 1, mode="min").is_max


def test_what_cannot_be_read_is_left_to_a_person_and_counts_for_nothing():
    records = [*LOSSES, unreadable(45), unreadable(60)]
    assert LatestN(2).keeps(records) == {40, 45, 50, 60}
    assert BestN("val_loss", 1).keeps(records) == {40, 45, 50, 60}


def test_a_step_that_was_saved_twice_counts_once():
    records = [
        record(10, loss=1.0),
        record(20, loss=5.0),
        record(20, attempt="b", loss=4.0),
        record(30, loss=9.0),
    ]
    assert LatestN(2).keeps(records) == {20, 30}
    assert BestN("loss", 2).keeps(records) == {10, 20, 30}


records_of_any_run = st.lists(
    st.one_of(
        st.builds(lambda step, loss: record(step, loss=loss), st.integers(0, 30), st.floats()),
        st.builds(record, st.integers(0, 30)),
        st.builds(unreadable, st.integers(0, 30)),
    ),
    max_size=12,
)
policies = st.recursive(
    st.one_of(
        st.builds(LatestN, st.integers(1, 5)),
        st.builds(BestN, st.just("loss"), st.integers(1, 5), st.sampled_from(["auto", "min", "max"])),
    ),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=4,
)


@hypothesis.given(policies, records_of_any_run, st.randoms())
def test_the_newest_is_kept_and_the_order_does_not_matter(policy, records, random):
    kept = policy.keeps(records)
    readable = [one.step for one in records if one.manifest is not None]
    assert kept <= {one.step for one in records}
    assert not readable or max(readable) in kept
    shuffled = list(records)
    random.shuffle(shuffled)
    assert policy.keeps(shuffled) == kept
    # Deleting the others, then deciding again, deletes nothing more.
    assert policy.keeps([one for one in records if one.step in kept]) == kept


def test_unions_are_flat():
    union = LatestN(1) | BestN("loss", 1) | LatestN(2)
    assert isinstance(union, KeepUnion) and len(union.policies) == 3
    for other in (3, LatestN):
        with pytest.raises(TypeError, match="unsupported operand"):
            LatestN(2) | other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LatestN(0), "`n` must be a whole number of at least 1; received 0. Try `LatestN"),
        (lambda: BestN("loss", -1), "`n`.*received -1. Try `BestN"),
        (lambda: BestN("loss", 1, mode="best"), "`mode` must be .*received 'best'"),
    ],
)
def test_refusals_name_the_argument_and_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
