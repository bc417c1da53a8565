"""Buckets, segments and buffers: plain arithmetic and one memory pool."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.collectives import buckets
from tfdist_ext.collectives.buffer_pool import ALIGNMENT_BYTES, BufferPool

TENSORS = st.lists(st.tuples(st.sampled_from(["float32", "int64"]), st.integers(0, 100)), max_size=20)


@given(TENSORS, st.integers(0, 150))
def test_every_tensor_is_in_one_bucket_of_its_dtype(tensors, bytes_per_pack):
    plan = buckets.plan_buckets([t[0] for t in tensors], [t[1] for t in tensors], bytes_per_pack)
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(tensors)))
    for bucket in plan:
        assert len({tensors[index][0] for index in bucket}) == 1
        # The last layer's gradients are there first.
        assert bucket == sorted(bucket, reverse=True)
        # Without its last tensor a bucket was still open.
        assert not bytes_per_pack or sum(tensors[index][1] for index in bucket[:-1]) < bytes_per_pack


@given(st.lists(st.integers(0, 50), max_size=10), st.sampled_from([1, 2, 4, 8]))
def test_segments_are_aligned_and_do_not_overlap(lengths, item_bytes):
    starts, total = buckets.segment_starts(lengths, item_bytes)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert all(start * item_bytes % ALIGNMENT_BYTES == 0 for start in starts)
    assert all(end <= following for end, following in zip(ends, [*starts, total][1:], strict=True))


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match="bytes_per_pack"):
        buckets.plan_buckets([], [], -1)
    with pytest.raises(ValueError, match="item_bytes"):
        buckets.segment_starts([1], 3)


def test_a_buffer_is_used_again_only_when_nothing_refers_to_it():
    pool = BufferPool()
    dtype = np.dtype("float32")
    first = pool.take(1000, dtype)
    address = first.ctypes.data
    part = first[10:20].reshape(2, 5)
    del first
    second = pool.take(1000, dtype)
    assert second.ctypes.data != address  # `part` still lies in it.
    del part
    assert pool.take(1000, dtype).ctypes.data == address


def test_more_buffers_than_are_kept():
    pool = BufferPool(max_buffers_of_a_size=1)
    held = [pool.take(16, np.dtype("float64")) for _ in range(3)]
    assert len({buffer.ctypes.data for buffer in held}) == 3
    assert all(buffer.ctypes.data % ALIGNMENT_BYTES == 0 for buffer in held)


def test_h10_many_sizes_keep_a_bounded_number_of_bytes():
    pool = BufferPool(max_bytes=1 << 20)
    for size in range(1000, 200_000, 1000):  # 199 sizes, 20 MB in all.
        pool.take(size, np.dtype("uint8"))
    kept = sum(raw.nbytes for buffers in pool._buffers.values() for raw in buffers)
    assert kept <= 1 << 20
    # The sizes that were asked for last are still there.
    assert list(pool._buffers)[-1] == 199_000


def test_h10_a_buffer_in_use_is_nobody_elses_though_the_pool_let_go_of_it():
    pool = BufferPool(max_bytes=1000)
    first, second = pool.take(900, np.dtype("uint8")), pool.take(900, np.dtype("uint8"))
    first[:], second[:] = 1, 2
    assert first.sum() == 900 and second.sum() == 1800
