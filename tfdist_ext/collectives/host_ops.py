"""How do tensors of a graph enter and leave a process group?

Each collective is one or two host functions. They run in the order in which they were traced: within a graph
a chain of control dependencies keeps it, so that all workers submit the same sequence.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives import buckets
from tfdist_ext.collectives.buffer_pool import BufferPool

_HOST = "/device:CPU:0"


class HostCollectives:
    """Collectives of a `ProcessGroup` over tensors, in graphs and eagerly.

    Runs on: every worker, in the same order.

    Args:
        group: The `ProcessGroup`.
        bytes_per_pack: See `buckets.plan_buckets`.
        note_failure: Called with a typed error before TensorFlow turns it into `UnknownError`.
    """

    def __init__(self, group, bytes_per_pack: int, note_failure):
        self.num_workers = group.size
        self._group = group
        self._bytes_per_pack = bytes_per_pack
        self._note_failure = note_failure
        # The name of the last collective of each graph being traced: the operation itself would keep its graph.
        self._last: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._waiting: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._buffers = BufferPool()

    # --- operations --------------------------------------------------------------------------------------------
    def sum(self, tensors, name: str, counts_step: bool = False) -> list:
        """Sums each dense tensor over all workers.

        Args:
            tensors: Tensors of any shapes and dtypes, the same on every worker.
            name: Name for messages.
            counts_step: True where each run is one training step; `group.step` then names it in errors.

        Returns:
            Tensors of the same shapes.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        sizes = [
            None if t.shape.num_elements() is None else t.shape.num_elements() * t.dtype.size for t in tensors
        ]
        plan = buckets.plan_buckets([t.dtype.name for t in tensors], sizes, self._bytes_per_pack)
        results: list = [None] * len(tensors)
        if tf.executing_eagerly() or len(plan) == 1:
            for number, bucket in enumerate(plan):
                outputs = self._call(
                    self._sum_now(f"{name}/{number}", counts_step and number == 0),
                    [tensors[i] for i in bucket],
                    [tensors[i] for i in bucket],
                )
                for index, output in zip(bucket, outputs, strict=True):
                    results[index] = output
            return results
        handles = [
            self._call(
                self._submit_sum(f"{name}/{number}", counts_step and number == 0),
                [tensors[i] for i in bucket],
                [_HANDLE],
            )[0]
            for number, bucket in enumerate(plan)
        ]
        for bucket, handle in zip(plan, handles, strict=True):
            outputs = self._call(self._await, [handle], [tensors[i] for i in bucket])
            for index, output in zip(bucket, outputs, strict=True):
                results[index] = output
        return results

    def gather(self, tensor, name: str, counts_step: bool = False) -> list:
        """Collects a tensor of every worker; first dimensions may differ.

        Args:
            tensor: Dense tensor of rank >= 1.
            name: Name for messages.
            counts_step: See `sum`.

        Returns:
            List of the workers' tensors, by rank.
        """
        tensor = tf.convert_to_tensor(tensor)
        shaped = tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)

        def gather_now(array):
            if counts_step:
                self._count_step()
            return tuple(self._group.all_gather(array, name=name))

        return self._call(gather_now, [tensor], [shaped] * self._group.size)

    def broadcast(self, tensor, name: str):
        """Gives the chief's tensor to every worker."""
        tensor = tf.convert_to_tensor(tensor)
        return self._call(lambda array: (self._group.broadcast(array, name=name),), [tensor], [tensor])[0]

    # --- host functions ----------------------------------------------------------------------------------------
    def _pack(self, arrays):
        lengths = [array.size for array in arrays]
        starts, total = buckets.segment_starts(lengths, arrays[0].itemsize)
        buffer = self._buffers.take(total, arrays[0].dtype)
        for array, start, following in zip(arrays, starts, [*starts[1:], total], strict=True):
            # The input may alias a TensorFlow buffer: it is copied, never reduced in place.
            buffer[start : start + array.size] = array.reshape(-1)
            # What lies between segments is summed too, and must not be somebody's infinities.
            buffer[start + array.size : following] = 0
        layout = [
            (start, start + length, array.shape)
            for array, start, length in zip(arrays, starts, lengths, strict=True)
        ]
        return buffer, layout

    def _count_step(self):
        self._group.step = (self._group.step or 0) + 1

    def _sum_now(self, name, counts_step):
        def sum_now(*arrays):
            if counts_step:
                self._count_step()
            if len(arrays) == 1 and arrays[0].size <= 1024:
                return (self._group.all_reduce(arrays[0], name=name),)
            buffer, layout = self._pack(arrays)
            return _unpack(self._group.submit_all_reduce(buffer, name=name).result(), layout)

        return sum_now

    def _submit_sum(self, name, counts_step):
        def submit(*arrays):
            if counts_step:
                self._count_step()
            buffer, layout = self._pack(arrays)
            number = next(self._numbers)
            future = self._group.submit_all_reduce(buffer, name=name)
            self._waiting[number] = (future, layout)
            return (np.int64(number),)

        return submit

    def _await(self, number):
        future, layout = self._waiting.pop(int(number))
        return _unpack(future.result(), layout)

    # --- from Python into the graph ------------------------------------------------------------------------------
    def _call(self, function, inputs, like) -> list:
        """Runs `function` on NumPy arrays; `like` gives dtype and static shape of each result."""

        def noted(*arrays):
            try:
                return function(*arrays)
            except Exception as error:
                self._note_failure(error)
                raise

        if tf.executing_eagerly():
            results = noted(*[value.numpy() for value in inputs])
            return [
                tf.convert_to_tensor(result, template.dtype)
                for result, template in zip(results, like, strict=True)
            ]
        graph = tf.compat.v1.get_default_graph()
        last = self._last.get(graph)
        before = [] if last is None else [graph.get_operation_by_name(last)]
        with tf.device(_HOST), tf.control_dependencies(before):
            outputs = tf.numpy_function(noted, inputs, [template.dtype for template in like])
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        self._last[graph] = outputs[0].op.name
        for output, template in zip(outputs, like, strict=True):
            output.set_shape(template.shape)
        return outputs


_HANDLE = tf.TensorSpec([], tf.int64)


def _unpack(buffer, layout):
    return tuple(buffer[start:end].reshape(shape) for start, end, shape in layout)
