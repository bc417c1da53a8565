"""Which slot computes which rows of a global batch? Pure arithmetic, no TensorFlow."""

from __future__ import annotations


def rows_per_slot(num_rows: int, num_slots: int) -> list[int]:
    """Splits the rows of one global batch over the slots, as evenly as whole rows allow.

    The first `num_rows % num_slots` slots get one row more. Slot k's rows follow slot k-1's, so that
    putting the slots' rows one after another restores the order of the batch.

    Args:
        num_rows: Rows of the global batch, >= 0.
        num_slots: Number of replicas over all workers, >= 1.

    Returns:
        `num_slots` row counts that sum to `num_rows`.

    Raises:
        ValueError: A negative count of rows, or no slot.

    Example:
        >>> rows_per_slot(5, 4)
        [2, 1, 1, 1]
    """
    if num_rows < 0 or num_slots < 1:
        raise ValueError(
            "Arguments must be `num_rows` >= 0 and `num_slots` >= 1; "
            f"received num_rows={num_rows}, num_slots={num_slots}."
        )
    quotient, remainder = divmod(num_rows, num_slots)
    return [quotient + (slot < remainder) for slot in range(num_slots)]


def first_row_of_slot(slot: int, num_rows: int, num_slots: int) -> int:
    """Returns the index in the global batch of the first row of `slot`.

    Args:
        slot: 0 <= slot < num_slots.
        num_rows: Rows of the global batch.
        num_slots: Number of slots.

    Returns:
        The sum of the row counts of the slots before it.

    Raises:
        ValueError: As `rows_per_slot`.

    Example:
        >>> first_row_of_slot(2, 5, 4)
        3
    """
    return sum(rows_per_slot(num_rows, num_slots)[:slot])
