"""Which batches does each worker of a parameter-server cluster read, and who opens them?

The graph of a dataset is sent to the workers, which read it themselves. Shard `i` of `n` holds the batches `i`,
`i + n`, `i + 2n`, ... of the dataset. A shard can be opened at any position of any pass by any worker, always with the
same batches behind it: this is what lets another worker go on where a dead one stopped. Datasets that cannot leave the
chief (Python functions, lookup tables) are read there, and their batches are sent.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist_ext import compat, errors
from tfdist_ext.data import seeding
from tfdist_ext.data.shard_reader import ChiefFeed

_LARGEST_GRAPH_BYTES = 512 << 20


class GraphSource:
    """A dataset as a graph that any task can open.

    Args:
        dataset: The dataset.
        num_shards: Number of shards.
        shard: Which one this is, or None where each shard is `dataset` itself.
    """

    fed_by_chief = False

    def __init__(self, dataset: tf.data.Dataset, graph, num_shards: int = 1, shard: int | None = None):
        self._spec = dataset.element_spec
        self._order = seeding.PassOrder(dataset, graph)
        self._num_shards, self._shard = num_shards, shard
        self._autotunes = dataset.options().autotune.enabled is True

    @property
    def is_the_same_in_each_pass(self) -> bool:
        """True where what `dataset` returned for one pass serves all."""
        return not self._order.differs_by_pass

    def dataset(self, pass_number: int) -> tf.data.Dataset:
        """Makes the dataset of a pass on the device in force."""
        graph = self._order.graph_of_pass(pass_number)
        dataset = compat.VariantDataset(compat.dataset_from_graph(graph), self._spec)
        for _ in range(self._order.passes_to_skip(pass_number)):
            iter(dataset)  # A shuffle with a seed draws the order of the next pass each time it is opened.
        return dataset

    def open(self, dataset: tf.data.Dataset, position: int):
        """Returns an iterator whose next element is the shard's `position`-th batch."""
        if self._shard is not None and self._num_shards > 1:
            dataset = dataset.shard(self._num_shards, self._shard)
        if position:
            dataset = dataset.skip(position)
        dataset = dataset.prefetch(2)
        if not self._autotunes:
            # The thread that tunes may sleep for up to a minute on while its iterator is closed, and all calls to the
            # task wait for that.
            options = tf.data.Options()
            options.autotune.enabled = False
            dataset = dataset.with_options(options)
        return iter(dataset)

    def operations(self) -> list[str]:
        """Returns the types of the dataset operations, in the order of the graph."""
        return self._order.operations()


class WorkerDataset(compat.DistributedDataset):
    """A dataset divided over the workers of a parameter-server cluster.

    Attributes:
        sources: One for each shard; a single one when the chief reads.
        num_shards: Number of shards: the number of workers.
        lengths: Batches of each shard, None where unknown.
        is_infinite: True for a dataset that repeats for ever.
        fed_by_chief: None, or the reason why the chief reads the dataset and sends its batches.
        strategy: The strategy it was distributed by.
        is_one_sequence: True where the shards are every n-th batch of one dataset, False where each is its own.
    """

    def __init__(
        self,
        sources,
        element_spec,
        num_shards,
        lengths,
        is_infinite,
        fed_by_chief=None,
        is_one_sequence=False,
    ):
        self.sources = sources
        self.num_shards = num_shards
        self.lengths = lengths
        self.is_infinite = is_infinite
        self.fed_by_chief = fed_by_chief
        self.strategy: Any = None
        self.is_one_sequence = is_one_sequence
        self._element_spec = element_spec
        self._passes = itertools.count()
        self._num_opened_here = 0

    @classmethod
    def from_dataset(cls, dataset, num_workers: int) -> WorkerDataset:
        """Divides a dataset by batches.

        Runs on: chief.

        Args:
            dataset: Batched `tf.data.Dataset`. With `auto_shard_policy` OFF every worker reads all of it.
            num_workers: Number of workers.
        """
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                f"Argument `dataset` must be a tf.data.Dataset; received {type(dataset).__name__}."
            )
        policy = dataset.options().experimental_distribute.auto_shard_policy
        everything = policy == tf.data.experimental.AutoShardPolicy.OFF
        number = int(dataset.cardinality())
        known = number >= 0
        lengths = [
            (number if everything else len(range(index, number, num_workers))) if known else None
            for index in range(num_workers)
        ]
        infinite = number == tf.data.INFINITE_CARDINALITY
        graph, reason = _shippable_graph(dataset)
        if reason is not None:
            logging.info("The chief reads this dataset and sends its batches to the workers: %s.", reason)
            return cls([dataset], dataset.element_spec, num_workers, lengths, infinite, reason, True)
        sources = [
            GraphSource(dataset, graph, num_workers, None if everything else index)
            for index in range(num_workers)
        ]
        return cls(
            sources, dataset.element_spec, num_workers, lengths, infinite, is_one_sequence=not everything
        )

    @classmethod
    def from_function(cls, dataset_fn, num_workers: int) -> WorkerDataset:
        """Gives each worker the dataset that a function makes for it.

        Runs on: chief, which builds all of them; the workers read.

        Args:
            dataset_fn: Function of a `tf.distribute.InputContext`, whose `input_pipeline_id` is the worker's index and
                `num_input_pipelines` the number of workers.
            num_workers: Number of workers.
        """
        datasets = [dataset_fn(compat.InputContext(num_workers, index, 1)) for index in range(num_workers)]
        for dataset in datasets:
            if not isinstance(dataset, tf.data.Dataset):
                raise ValueError(
                    f"Argument `dataset_fn` must return a tf.data.Dataset; it returned {type(dataset).__name__}."
                )
        numbers = [int(dataset.cardinality()) for dataset in datasets]
        sources = []
        for dataset in datasets:
            graph, reason = _shippable_graph(dataset)
            if reason is not None:
                raise ValueError(
                    f"The dataset that `dataset_fn` returned cannot be sent to a worker: {reason}. Use tf.data "
                    "operations only, or pass the dataset itself to `fit`, which the chief then reads."
                )
            sources.append(GraphSource(dataset, graph))
        lengths = [number if number >= 0 else None for number in numbers]
        infinite = any(number == tf.data.INFINITE_CARDINALITY for number in numbers)
        return cls(sources, datasets[0].element_spec, num_workers, lengths, infinite)

    @property
    def element_spec(self):
        """Structure of specs of one batch."""
        return self._element_spec

    @property
    def batch_spec(self):
        """Structure of specs of one batch, which is what one worker computes on."""
        return self._element_spec

    @property
    def num_batches(self) -> int | None:
        """Batches of a pass over all shards, or None where that is not known."""
        return None if any(length is None for length in self.lengths) else sum(self.lengths)

    @property
    def cardinality(self) -> int:
        """`num_batches`, or tf.data's INFINITE (-1) and UNKNOWN (-2)."""
        if self.is_infinite:
            return tf.data.INFINITE_CARDINALITY
        return tf.data.UNKNOWN_CARDINALITY if self.num_batches is None else self.num_batches

    def __iter__(self):
        return WorkerIterator(self, next(self._passes))

    def open_on_chief(self, pass_number: int):
        """Returns an iterator over the batches of a pass, in the process of the chief."""
        while self._num_opened_here < pass_number:
            iter(self.sources[0])  # A shuffle draws the order of the next pass each time it is opened.
            self._num_opened_here += 1
        self._num_opened_here += 1
        return iter(self.sources[0])

    def report(self) -> str:
        """Says on which task each operation of the input pipeline runs.

        Example:
            >>> data = WorkerDataset.from_dataset(tf.data.Dataset.range(10).batch(2).repeat(), 2)
            >>> print(data.report())
            RangeDataset, BatchDatasetV2, RepeatDataset, ShardDataset, PrefetchDataset
              shard 0 of 2: on worker:0, or, when it dies, on the worker that takes its shard
              shard 1 of 2: on worker:1, or, when it dies, on the worker that takes its shard
        """
        if self.fed_by_chief is not None:
            return f"All operations run on chief:0, which sends the batches: {self.fed_by_chief}"
        lines = []
        sharded = self.sources[0]._shard is not None and self.num_shards > 1
        own = ["ShardDataset", "PrefetchDataset"] if sharded else ["PrefetchDataset"]
        lines.append(", ".join([*self.sources[0].operations(), *own]))
        for index in range(self.num_shards):
            lines.append(
                f"  shard {index} of {self.num_shards}: on worker:{index}, or, when it dies, on the worker that "
                "takes its shard"
            )
        return "\n".join(lines)


class WorkerIterator:
    """One pass over a `WorkerDataset`.

    Attributes:
        dataset: The dataset.
        pass_number: How many passes were opened before it.
        leases: Set by whoever reads: which batches are taken.
        lock: Held by whoever changes the leases.
        saved_leases: Where a checkpoint stood in this pass, for whoever reads; None at the beginning.
        was_used: Set by whoever reads: function of shard and position of batches that a checkpoint has; or None.
        source: Who computes on it: has `has_next()` and `close()`.
        max_steps: Steps of the epoch, or None for as many as there are.
        next_for_keras: What `next` does, set where Keras asks for batches one by one.
    """

    def __init__(self, dataset: WorkerDataset, pass_number: int):
        self.dataset = dataset
        self.pass_number = pass_number
        self.leases: Any = None
        self.lock: contextlib.AbstractContextManager = contextlib.nullcontext()
        self.saved_leases: dict[str, Any] | None = None
        self.was_used: Callable[[int, int], bool] | None = None
        self.source: Any = None
        self.max_steps: int | None = None
        self.next_for_keras: Callable | None = None
        self._feed: ChiefFeed | None = None

    @property
    def element_spec(self):
        """Structure of specs of one batch."""
        return self.dataset.element_spec

    @property
    def feed(self) -> ChiefFeed | None:
        """The batches that the chief reads, or None where workers read."""
        if self.dataset.fed_by_chief is not None and self._feed is None:
            elements = self.dataset.open_on_chief(self.pass_number)
            self._feed = ChiefFeed(elements, self.dataset.num_shards, self.was_used)
        return self._feed

    def leases_state(self) -> dict[str, Any] | None:
        """Returns which batches are unread, those in flight among them, as plain data; None where nobody reads yet."""
        with self.lock:
            return self.saved_leases if self.leases is None else self.leases.state_dict()

    def go_to(self, state: dict[str, Any]) -> None:
        """Has reading go on where `leases_state` found it; nobody reads yet.

        Raises:
            CheckpointMismatchError: It was another number of workers, each with a dataset of its own.
        """
        saved, number = len(state["shards"]), self.dataset.num_shards
        if saved != number and not self.dataset.is_one_sequence:
            raise errors.CheckpointMismatchError(
                f"The checkpoint is of {saved} workers, each with a dataset of its own, and here are {number}: who "
                "would read on in which cannot be known. Resume with as many workers, or at the end of an epoch; or "
                "pass one dataset to `fit`, which is divided over any number of workers."
            )
        self.saved_leases = state

    def go_to_batch(self, number: int) -> None:
        """Has reading go on at a batch of the dataset, counted from 0; see `go_to`."""
        if number:
            shard = {"position": number, "end": None, "num_applied": number, "num_dropped": 0}
            self.go_to({"shards": [shard], "pending": [], "doubtful": []})

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_for_keras is not None:
            return self.next_for_keras(self)
        raise RuntimeError(
            "The batches of this dataset are on the workers; use `fit`, `evaluate` or `predict`."
        )


def _shippable_graph(dataset):
    """Returns the GraphDef of a dataset and None, or None and why it must stay on the chief."""
    reason = _bound_to_the_chief(dataset)
    if reason is not None:
        return None, reason
    try:
        text = compat.serialized_graph(dataset).numpy()
    except (tf.errors.OpError, ValueError, TypeError) as error:
        return None, f"it cannot be serialized ({str(error).splitlines()[0][:200]})"
    if len(text) > _LARGEST_GRAPH_BYTES:
        return None, f"its arrays are {len(text) >> 20} MiB; files would let the workers read"
    graph = tf.compat.v1.GraphDef.FromString(text)
    if any("PyFunc" in node.op for function in graph.library.function for node in function.node_def):
        return None, "it calls a Python function"
    return graph, None


def _bound_to_the_chief(dataset) -> str | None:
    for node in compat.dataset_nodes(dataset):
        for function in compat.dataset_functions(node):
            for operation in function.graph.get_operations():
                if "PyFunc" in operation.type:
                    return f"`{compat.dataset_type_name(node)}` calls a Python function"
            if any(tensor.dtype == tf.resource for tensor in function.captured_inputs):
                return f"`{compat.dataset_type_name(node)}` uses a table or a variable of this process"
    return None
