"""Whole groups over real sockets, their tasks being threads of this process."""

import concurrent.futures
import time

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.groups import DEADLINE_SECONDS, connected, each, free_addresses, names
from tfdist_ext import errors
from tfdist_ext.collectives import ProcessGroup, StreamAbandoned


@pytest.fixture(scope="module", params=[1, 2, 3])
def groups(request):
    # Small limits, so that arrays of a few hundred values go around the ring in several chunks.
    with connected(
        request.param,
        ring_chunk_bytes=256,
        direct_threshold_bytes=512,
        per_rank=lambda rank: {"hello": {"rank": rank, "keras": "3"}},
    ) as members:
        yield members


def test_every_task_sees_all_hellos(groups):
    expected = [{"rank": rank, "keras": "3"} for rank in range(len(groups))]
    assert [group.hellos for group in groups] == [expected] * len(groups)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (40, 25)])
def test_all_reduce(groups, dtype, shape):
    size = len(groups)
    # Rank r contributes r + 1 everywhere; small integers are exact in every dtype.
    results = each(
        groups, lambda group: group.all_reduce(np.full(shape, group.rank + 1, dtype=dtype), name="sum")
    )
    for result in results:
        assert result.dtype == np.dtype(dtype) and result.shape == shape
        np.testing.assert_array_equal(result.astype(np.float64), np.full(shape, size * (size + 1) // 2))


def test_mean_of_a_large_array(groups):
    size = len(groups)
    results = each(
        groups, lambda group: group.all_reduce(np.full(1000, 4.0 * group.rank), name="mean", reduction="mean")
    )
    for result in results:
        np.testing.assert_array_equal(result, np.full(1000, 2.0 * (size - 1)))


def test_submitted_buffer_is_reduced_in_place_and_arguments_of_all_reduce_are_not(groups):
    buffers = [np.full(1000, 1.0, np.float32) for _ in groups]
    results = each(
        groups, lambda group: group.submit_all_reduce(buffers[group.rank], name="in place").result()
    )
    assert all(result is buffer for result, buffer in zip(results, buffers, strict=True))
    assert buffers[0][0] == len(groups)
    kept = [np.ones(1000, np.float32) for _ in groups]
    each(groups, lambda group: group.all_reduce(kept[group.rank], name="copied"))
    np.testing.assert_array_equal(kept[0], np.ones(1000))


def test_gathers(groups):
    size = len(groups)
    arrays = [np.full((rank, 2), rank, ml_dtypes.bfloat16) for rank in range(size)]
    for result in each(groups, lambda group: group.all_gather(arrays[group.rank], name="rows")):
        for got, sent in zip(result, arrays, strict=True):
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(got, sent)
    texts = [b"x" * (100_000 * rank) for rank in range(size)]
    assert (
        each(groups, lambda group: group.all_gather_bytes(texts[group.rank], name="bytes")) == [texts] * size
    )


def test_broadcast_and_barrier(groups):
    root = len(groups) - 1
    values = each(
        groups, lambda group: group.broadcast(np.full((2, 3), group.rank), root=root, name="initial")
    )
    for value in values:
        np.testing.assert_array_equal(value, np.full((2, 3), root))
    assert each(groups, lambda group: group.barrier("end")) == [None] * len(groups)


def test_streams_may_be_entered_in_different_orders(groups):
    def work(group):
        order = ["a", "b", "c"] if group.rank % 2 else ["c", "a", "b"]
        futures = {
            stream: group.submit_all_reduce(np.full(500, float(ord(stream))), name=stream, stream=stream)
            for stream in order
        }
        return [futures[stream].result()[0] for stream in "abc"]

    size = len(groups)
    assert each(groups, work) == [[97.0 * size, 98.0 * size, 99.0 * size]] * size


def test_results_may_be_overwritten_at_once():
    """A buffer handed out must not be on its way to a peer any more."""
    with connected(2, ring_chunk_bytes=1 << 17, direct_threshold_bytes=0) as groups:

        def work(group):
            for repetition in range(20):
                buffer = np.full(1 << 18, float(repetition))
                result = group.submit_all_reduce(buffer, name="values").result()
                if not np.all(result == 2.0 * repetition):
                    return f"wrong sum in repetition {repetition}"
                result[:] = -1.0
            return "right"

        assert each(groups, work) == ["right", "right"]


@pytest.mark.parametrize(
    "entries",
    [
        lambda group: group.all_reduce(np.ones(3 + group.rank % 2, np.float32), name="w"),
        lambda group: group.all_reduce(np.ones(3, [np.float32, np.float64][group.rank % 2]), name="w"),
        lambda group: group.all_reduce(np.ones(3), name="wv"[group.rank % 2]),
        lambda group: group.barrier("w") if group.rank % 2 else group.all_reduce(np.ones(5000), name="w"),
        lambda group: group.all_gather(np.ones((2, 1 + group.rank % 2)), name="w"),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_signature_mismatch_fails_on_all_tasks_and_names_both(entries, size):
    with connected(size) as groups:
        for error in each(groups, entries):
            assert isinstance(error, errors.SignatureMismatchError)
            assert "worker:1" in str(error) and error.collective in ("w", "v")
        assert "worker:0" in str(groups[0].last_failure)
        # The stream stays failed, others go on.
        for error in each(groups, lambda group: group.barrier("next")):
            assert isinstance(error, errors.SignatureMismatchError)
        assert each(groups, lambda group: group.barrier("other", stream="other")) == [None] * size


def test_tasks_that_disagree_about_the_root_both_learn_it():
    with connected(2) as groups:
        for error in each(groups, lambda group: group.broadcast(np.ones(3), root=group.rank, name="w")):
            assert isinstance(error, errors.SignatureMismatchError)


def test_mismatch_names_both_shapes():
    with connected(2) as groups:
        found = each(
            groups, lambda group: group.all_reduce(np.ones((2, 3 + group.rank)), name=f"g{group.rank}")
        )
    for error in found:
        for part in ("worker:0", "worker:1", "'g0'", "'g1'", "float64[2, 3]", "float64[2, 4]"):
            assert part in str(error)
    assert [error.task for error in found] == ["worker:1", "worker:0"]


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_timeout_names_who_did_not_join(threshold):
    with connected(3, collective_timeout_seconds=0.6, direct_threshold_bytes=threshold) as groups:
        for group in groups[:2]:
            group.step = 7
        found = each(groups[:2], lambda group: group.all_reduce(np.ones(10), name="gradients"))
        for error in found:
            assert isinstance(error, errors.CollectiveTimeoutError)
            assert error.task == "worker:2" and "worker:2 did not join all_reduce 'gradients'" in str(error)
            assert "at step 7 since this start within" in str(error)


def test_result_with_a_timeout_may_be_called_again():
    with connected(2) as groups:
        future = groups[0].submit_barrier("late")
        with pytest.raises(errors.CollectiveTimeoutError, match="worker:1 did not join barrier 'late'"):
            future.result(timeout_seconds=0.05)
        groups[1].barrier("late")
        assert future.result() is None and future.done()


def test_abandon_ends_a_stream_here_and_there():
    with connected(2) as groups:
        pending = [
            groups[0].submit_barrier("has_next", stream="data"),
            groups[0].submit_barrier("x", stream="step"),
        ]
        groups[1].abandon("data")
        with pytest.raises(StreamAbandoned, match="worker:1 has abandoned"):
            pending[0].result(DEADLINE_SECONDS)
        groups[0].abandon("data")
        for group in groups:
            with pytest.raises(StreamAbandoned):
                group.barrier("again", stream="data")
        groups[1].barrier("x", stream="step")
        assert pending[1].result(DEADLINE_SECONDS) is None


def test_own_pending_operations_end_when_the_stream_is_abandoned():
    with connected(2) as groups:
        future = groups[0].submit_barrier("has_next", stream="data")
        groups[0].abandon("data")
        with pytest.raises(StreamAbandoned, match="worker:0 has abandoned"):
            future.result(DEADLINE_SECONDS)
        assert groups[0].last_failure is None


def test_goodbye_is_an_error_only_for_those_who_still_need_the_task():
    with connected(3) as groups:
        each(groups, lambda group: group.barrier("together"))
        waiting = groups[0].submit_broadcast(np.zeros(3), root=1, name="from 1")
        last_words = groups[2].submit_barrier("unfinished", stream="other")
        groups[2].close()
        with pytest.raises(errors.CollectiveError, match="closed"):
            last_words.result()
        root = groups[1].submit_broadcast(np.ones(3), root=1, name="from 1")
        np.testing.assert_array_equal(waiting.result(DEADLINE_SECONDS), np.ones(3))
        for future in (root, groups[0].submit_barrier("all")):
            with pytest.raises(errors.PeerLostError, match="worker:2 left the group normally"):
                future.result(DEADLINE_SECONDS)


def test_nothing_sent_before_the_goodbye_is_lost():
    with connected(2) as groups:
        payload = np.arange(1 << 20, dtype=np.float64)
        early = groups[1].submit_all_gather(payload[:1], name="last")
        # Task 0 is done as soon as the one row of task 1 is there, and closes with 8 MB of its own on the
        # way.
        groups[0].submit_all_gather(payload, name="last").result(DEADLINE_SECONDS)
        groups[0].close()
        np.testing.assert_array_equal(early.result(DEADLINE_SECONDS)[0], payload)


def test_closed_group_refuses():
    with connected(2) as groups:
        groups[0].close()
        with pytest.raises(errors.CollectiveError, match="closed"):
            groups[0].barrier("late")
        groups[0].close()


def test_messages_ahead_of_this_task_are_bounded():
    with connected(2) as groups:
        groups[1]._table._early_limit_bytes = 100_000  # So that the other's own bound does not keep it.
        future = groups[0].submit_all_gather_bytes(b"x" * 100_001, name="ahead")
        with pytest.raises(errors.CollectiveError, match="worker:0 is so far ahead of worker:1"):
            future.result(DEADLINE_SECONDS)


def test_settings_must_agree():
    addresses = free_addresses(2)
    found = each(
        range(2),
        lambda rank: ProcessGroup.connect(
            addresses, rank, task_names=names(2), ring_chunk_bytes=1024 * (rank + 1), start_timeout_seconds=10
        ),
    )
    for error in found:
        assert isinstance(error, errors.ConfigurationMismatchError)
        assert error.field == "settings.ring_chunk_bytes" and set(error.values) == {1024, 2048}


def test_wrong_arguments_are_plain_errors():
    with connected(1) as (group,):
        with pytest.raises(TypeError, match="bool"):
            group.all_reduce(np.array([True]), name="flags")
        with pytest.raises(ValueError, match="mean of integers"):
            group.all_reduce(np.array([1]), name="n", reduction="mean")
        with pytest.raises(ValueError, match="contiguous"):
            group.submit_all_reduce(np.ones((2, 2)), name="matrix")
        with pytest.raises(ValueError, match="root"):
            group.broadcast(np.ones(1), root=3, name="b")
        with pytest.raises(ValueError, match="first dimension"):
            group.all_gather(np.float32(1), name="scalar")
    with pytest.raises(ValueError, match="one entry a task"):
        ProcessGroup.connect(["127.0.0.1:1"], 0, task_names=names(2))


def test_submit_never_blocks():
    with connected(2) as groups:
        begin = time.monotonic()
        futures = [groups[0].submit_all_reduce(np.ones(1 << 16), name="ahead") for _ in range(20)]
        assert time.monotonic() - begin < 1.0 and not futures[0].done()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            late = pool.submit(
                lambda: [groups[1].all_reduce(np.ones(1 << 16), name="ahead")[0] for _ in range(20)]
            )
            assert late.result(DEADLINE_SECONDS) == [2.0] * 20
        assert [future.result(DEADLINE_SECONDS)[0] for future in futures] == [2.0] * 20
