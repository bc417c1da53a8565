"""Embedding tables by rows, shards, and where variables lie."""

import numpy as np
import pytest

from tests.ps_training import table_programs
from tests.single_host import oracle


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("optimizer", sorted(table_programs.OPTIMIZERS))
def test_a_table_trains_as_with_the_gradient_of_all_its_rows(chief, optimizer, num_shards):
    result = chief(table_programs.against_a_dense_gradient, optimizer=optimizer, num_shards=num_shards)
    assert result["shards"] == num_shards
    for actual, expected in zip(result["distributed"], result["alone"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=oracle.TOLERANCE)
    # 8 rows of 3 ids, of which the second repeats the first and every other third one is the same: 13 rows at most,
    # and their numbers of 4 bytes; the whole table would be 576,000 bytes.
    assert 8 * 8 * 8 < result["pushed"] < 13 * (8 * 8 + 4) + 400
    assert 8 * 8 * 8 < result["pulled"] < 13 * (8 * 8 + 4) + 400


def test_lazy_adam_moves_only_the_rows_a_batch_touches(chief):
    result = chief(table_programs.lazy_adam)
    np.testing.assert_allclose(result["table"], result["expected"], rtol=0, atol=oracle.TOLERANCE)
    assert not np.allclose(result["table"], 0)


def test_bytes_follow_the_rows_touched_and_not_the_table(chief):
    """16 ids a batch: 16 rows of 128 bytes pulled and pushed, with their numbers, whatever the table."""
    per_step = chief(table_programs.bytes_of_tables, sizes=[10_000, 200_000])
    touched = 2 * 16 * (128 + 4)
    assert per_step["10000"] == per_step["200000"]
    assert touched <= per_step["10000"] < 1.5 * touched


def test_p16_a_table_of_two_shards_is_restored_into_one_and_into_three(chief, tmp_path):
    result = chief(table_programs.save_in_shards_and_restore, directory=str(tmp_path))
    assert result == {"1": [True, True], "3": [True, True], "alone": True}


def test_variables_are_placed_largest_first_with_their_slots_beside_them(chief):
    """Kernels of 50x100, 100x200, 200x400 and 400x100 floats: the largest, 320 kB, against all others, 260 kB."""
    result = chief(table_programs.placed_largest_first)
    assert result["imbalance"] < 1.12
    assert result["beside"] and all(result["beside"])
    assert result["moved"]
