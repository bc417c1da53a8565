"""Who reads which rows? The choice behind `tf.data`'s auto-shard policy, made once and the same everywhere.

DATA: every worker walks the whole dataset and takes its rows of each global batch. The rows and their order
are those of one device. FILE: every worker reads files of its own; each row is read once an epoch. OFF: every
worker reads everything. AUTO: FILE where the source is files and there are enough of them, else DATA.
"""

from __future__ import annotations

import dataclasses
import json

import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.data import batches

_FILE_READERS = ("TFRecordDataset", "TextLineDataset", "FixedLengthRecordDataset", "ParquetDataset")
_POLICIES = tf.data.experimental.AutoShardPolicy


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What was decided about a dataset.

    Attributes:
        policy: "DATA", "FILE", "OFF", "FUNCTION" or "NONE" (one worker).
        reason: One sentence.
    """

    policy: str
    reason: str

    @property
    def by_rows(self) -> bool:
        """True where each global batch is cut into the rows of all slots."""
        return self.policy in ("DATA", "NONE")


def decide(dataset, extended) -> tuple[Sharding, tf.data.Dataset]:
    """Chooses the policy together with the other workers.

    Runs on: every worker.

    Args:
        dataset: Dataset of global batches.
        extended: Extended object of the strategy.

    Returns:
        The decision, and the dataset that this worker reads.

    Raises:
        ValueError: Policy FILE was asked for and the files cannot be divided; the same on all workers.
    """
    if extended.num_workers == 1:
        return Sharding("NONE", "there is one worker"), dataset
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _POLICIES.OFF:
        return Sharding("OFF", "the dataset's auto_shard_policy is OFF: every worker reads all rows"), dataset
    if policy == _POLICIES.DATA or policy == _POLICIES.HINT:
        return Sharding("DATA", f"the dataset's auto_shard_policy is {policy.name}"), dataset
    sharded, problem = _shard_by_file(dataset, extended)
    problem = _first_problem(problem, extended)
    if problem is None:
        return Sharding("FILE", f"the source is files ({policy.name})"), sharded
    if policy == _POLICIES.FILE:
        raise ValueError(
            f"auto_shard_policy=FILE cannot divide this dataset over {extended.num_workers} workers: {problem}. "
            "Write at least as many files as workers, or set auto_shard_policy to DATA."
        )
    if _file_sources(dataset):
        logging.warning("Input is divided by rows (DATA), not by files: %s.", problem)
    return Sharding("DATA", f"AUTO chose rows: {problem}"), dataset


def _shard_by_file(dataset, extended):
    sources = _file_sources(dataset)
    if not sources:
        return None, "the source is not files"
    try:
        sharded = _sharded(dataset, extended)
        iter(sharded)
        for source in sources:
            # Too few files are reported when the first element is read; here that is one record, not a batch.
            next(iter(_sharded(source, extended)), None)
        return sharded, None
    except (tf.errors.OpError, ValueError) as error:
        return None, str(getattr(error, "message", error)).split(". ")[0].strip().rstrip(".").split("\n")[0]


def _sharded(dataset, extended) -> tf.data.Dataset:
    specs = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    variant = compat.auto_shard_dataset(
        compat.dataset_variant(dataset),
        num_workers=extended.num_workers,
        index=extended.worker_index,
        auto_shard_policy=_POLICIES.FILE.value,
        num_replicas=extended.num_workers,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return compat.VariantDataset(variant, dataset.element_spec)


def _first_problem(problem, extended) -> str | None:
    payload = json.dumps(problem).encode()
    answers = extended.process_group.all_gather_bytes(payload, name="input/sharding")
    for worker, answer in enumerate(answers):
        if json.loads(answer) is not None:
            return f"{json.loads(answer)} (on {extended.process_group.task_names[worker]})"
    return None


def _file_sources(dataset) -> list:
    """Returns the datasets that open files, or whose functions do."""
    sources, pending, seen = [], [dataset], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        functions = compat.dataset_functions(node)
        if any(reader in compat.dataset_type_name(node) for reader in _FILE_READERS) or any(
            op.type.startswith(_FILE_READERS)
            for function in functions
            for op in function.graph.get_operations()
        ):
            sources.append(node)
        else:
            pending.extend(compat.dataset_inputs(node))
    return sources


def split_batches(dataset, num_parts: int):
    """Cuts each global batch into `num_parts` batches of consecutive rows, as one worker's share of a step.

    Args:
        dataset: Dataset of global batches.
        num_parts: Number of workers.

    Returns:
        Dataset of worker batches; every row once, in order.
    """
    spec = dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def cut(*batch):
        batch = batch[0] if len(batch) == 1 and not isinstance(spec, tuple) else batch
        rows = batches.num_rows(batch)

        @tf.autograph.experimental.do_not_convert
        def part(index):
            extra = rows % num_parts
            size = rows // num_parts + tf.cast(index < extra, tf.int64)
            return batches.slice_rows(batch, index * (rows // num_parts) + tf.minimum(index, extra), size)

        return tf.data.Dataset.range(tf.minimum(rows, num_parts)).map(part)

    return dataset.flat_map(cut)
