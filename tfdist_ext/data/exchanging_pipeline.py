"""How do workers tell each other, batch by batch, who still has data and how many rows each slot holds?

The exchange runs inside the input pipeline, one batch ahead of the step, so that nobody waits for it. A worker
that has run out goes on with empty sub-batches until the last one ends.
"""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from tfdist_ext.data import batches

# AutoGraph has nothing to do in our own functions, and says so at length.
plain = tf.autograph.experimental.do_not_convert


class ExchangingPipeline:
    """A local pipeline with the exchange added, built once and read by one iterator at a time.

    Args:
        elements: What `endless` returned; pipelines may share it.
        extended: Extended object of the strategy.
    """

    def __init__(self, elements, extended):
        self._extended = extended
        self._next_number = -1
        self._reader: weakref.ref | None = None
        self._dataset = self._with_exchange(elements).prefetch(2)

    @property
    def is_free(self) -> bool:
        """True unless an iterator that was opened here is still alive."""
        return self._reader is None or self._reader() is None

    def open(self, number: int, wrap):
        """Opens a pass.

        Args:
            number: Number of the iterator, the same on all workers.
            wrap: Makes the distributed iterator of a `tf.data.Iterator`.

        Returns:
            What `wrap` returned; once it is garbage, the workers stop exchanging for it.
        """
        self._next_number = number
        iterator = wrap(iter(self._dataset))
        self._reader = weakref.ref(iterator)
        weakref.finalize(iterator, self._extended.process_group.abandon, _stream(number))
        return iterator

    def _exchange(self, number, index, count, has_data, rows):
        if index != count:
            # An element before this one failed, which whoever reads hears first. TensorFlow goes on to the next, and
            # the others must not take this one for it.
            raise RuntimeError("The input failed before.")
        # A pass knows its number from its first element on: later ones may be computed while the next pass opens.
        number = int(number) if number >= 0 else self._next_number
        num_slots = _num_slots(self._extended)
        record = np.concatenate([[has_data], rows]).astype(np.int64)
        gathered = self._extended.exchange_input(_stream(number), record)
        if gathered is None:
            return np.int64(number), np.bool_(False), np.zeros(num_slots, np.int64)
        # Slot = local replica * number of workers + worker.
        by_slot = np.stack([record[1:] for record in gathered], axis=1).reshape(-1)
        return np.int64(number), np.bool_(any(record[0] for record in gathered)), by_slot

    def _with_exchange(self, elements):
        num_slots = _num_slots(self._extended)
        local_slots = list(self._extended.local_slots)

        @plain
        def exchanged(state, element):
            number, count = state
            index, (has_data, parts, rows) = element
            own = tf.gather(rows, local_slots) * tf.cast(has_data, tf.int64)
            number, anyone, all_rows = tf.numpy_function(
                self._exchange, [number, index, count, has_data, own], [tf.int64, tf.bool, tf.int64]
            )
            number.set_shape([])
            anyone.set_shape([])
            all_rows.set_shape([num_slots])
            return (number, count + 1), (anyone, parts, tf.concat([all_rows, rows[-1:]], axis=0))

        @plain
        def anyone_has_data(anyone, parts, rows):
            return anyone

        @plain
        def without_flag(anyone, parts, rows):
            return parts, rows

        # A scan is sequential: exchanges are matched across workers by their order.
        # The counter moves on where an element fails, and the count of exchanges does not.
        numbered = tf.data.Dataset.zip(tf.data.Dataset.counter(), elements)
        exchanges = numbered.scan((tf.constant(-1, tf.int64), tf.constant(0, tf.int64)), exchanged)
        return exchanges.take_while(anyone_has_data).map(without_flag)


def endless(local, extended):
    """Marks what a local pipeline yields as data, and goes on with empty sub-batches for ever.

    Args:
        local: Dataset of `(sub-batches of the local slots, rows of every slot and the digest of the batch)`.
        extended: Extended object of the strategy.

    Returns:
        Dataset of `(has data, sub-batches, rows)`.
    """
    specs = batches.with_unknown_rows(local.element_spec[0])
    empty = tuple(batches.empty_batch(spec) for spec in specs)

    @plain
    def mark(parts, rows):
        return True, as_spec(parts, specs), rows

    @plain
    def nothing(_):
        return False, as_spec(empty, specs), tf.zeros([_num_slots(extended) + 1], tf.int64)

    return local.map(mark).concatenate(tf.data.Dataset.from_tensors(0).repeat().map(nothing))


def _num_slots(extended) -> int:
    return len(extended.local_slots) * extended.num_workers


def _stream(number: int) -> str:
    return f"input/{number}"


def as_spec(parts, specs):
    """Forgets static row counts, so that the batches of data and the empty ones are of one type."""

    def relax(value, spec):
        if isinstance(value, tf.Tensor):
            return tf.compat.v1.placeholder_with_default(value, spec.shape)
        return value

    return tf.nest.map_structure(relax, parts, specs)
