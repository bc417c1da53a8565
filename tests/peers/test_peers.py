"""Keras' own tests of losses and of compiled losses, under two replicas: those that fail have a known reason."""

from tests.peers.__main__ import compared
from tests.peers.known import reason_of


def test_what_fails_without_a_known_reason_is_wrong():
    expected = {"a": ("passed", ""), "b": ("failed", "no jax"), "c": ("passed", ""), "d": ("passed", "")}
    results = {
        "a": ("passed", ""),
        "b": ("failed", "no jax"),
        "c": ("failed", "1 != 2"),
        "d": ("skipped", "why"),
    }
    counts, unknown = compared("mirrored", results, expected)
    assert counts == {"passed": 1, "fails on one device too": 1, "wrong": 1, "skipped": 1}
    assert unknown == {"c": "1 != 2"}


def test_a_reason_holds_at_its_place():
    words = "AssertionError: False != True"
    assert reason_of("mirrored", "OptimizerSparseTest::test_sparse_gradients_sgd", words)
    assert reason_of("parameter_servers", "OptimizerSparseTest::test_sparse_gradients_sgd", words) is None
