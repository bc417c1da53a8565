"""How do workers that read the same dataset read it in the same order?

Steps that may give their elements in any order (`deterministic=False`) are told to keep it.
A shuffle without a seed draws another order in every process: rows would be read twice and others never.
Here the unseeded random ops of a dataset are given seeds that the chief drew, new ones for each pass. Seeded
datasets are left as they are.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import tensorflow as tf

from tfdist_ext import compat

_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset", "RejectionResample")
# Position of the input that is a handle to a generator of seeds.
_WITH_SEED_GENERATOR = {"ShuffleDatasetV3": 4, "ShuffleAndRepeatDatasetV2": 5, "RandomDatasetV2": 2}
_generators = itertools.count()


def agreed_order(dataset, extended):
    """Returns a function of the pass number that opens `dataset` in an order all workers share.

    Runs on: every worker.

    Args:
        dataset: Dataset of global batches.
        extended: Extended object of the strategy.

    Returns:
        Pair of a function `pass number -> tf.data.Dataset`, and whether one dataset serves all passes. A shuffle
        with a seed draws a new order each pass by itself; a random op inside a `map` would repeat itself.
    """
    if extended.num_workers == 1:
        return (lambda _: dataset), True
    base = int(extended.process_group.broadcast(_fresh_seed(), name="input/seed")[0])
    is_seeded = not compat.unseeded_steps(dataset)
    if is_seeded and not compat.unordered_steps(dataset):
        return (lambda _: dataset), True
    try:
        graph = tf.compat.v1.GraphDef.FromString(compat.serialized_graph(dataset).numpy())
    except (tf.errors.OpError, ValueError, TypeError) as error:
        if is_seeded:
            raise ValueError(
                f"The dataset may give its elements in any order (`{compat.unordered_steps(dataset)[0]}`), so that "
                f"each worker would read other rows, and it could not be told to keep it ({error}). Set "
                "deterministic=True."
            ) from error
        raise ValueError(
            "The dataset shuffles without a seed, so that each worker would read other rows, and it could not be "
            f"given one ({error}). Pass `seed=` to its shuffles, or call keras.utils.set_random_seed(...) first."
        ) from error
    keep_order(graph)
    if is_seeded:
        variant = compat.dataset_from_graph(graph.SerializeToString())
        ordered = compat.VariantDataset(variant, dataset.element_spec)
        return (lambda _: ordered), True

    def open_pass(index):
        seeded = _with_seeds(graph, base, index)
        variant = compat.dataset_from_graph(seeded.SerializeToString())
        return compat.VariantDataset(variant, dataset.element_spec)

    in_functions = any(compat.is_unseeded_random(node) for f in graph.library.function for node in f.node_def)
    return open_pass, not in_functions


def keep_order(graph) -> None:
    """Has all steps of a dataset's GraphDef give their elements in the order of their input.

    Args:
        graph: The GraphDef; it is changed.
    """
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        if "Dataset" not in node.op:
            continue
        if node.attr["deterministic"].s == b"false":
            node.attr["deterministic"].s = b"true"
        if node.attr["sloppy"].b:
            node.attr["sloppy"].b = False
        if node.op == "OptionsDataset":
            node.attr["serialized_options"].s = compat.ordered_options(node.attr["serialized_options"].s)
        for name in ("deterministic", "sloppy"):
            if node.attr[name].WhichOneof("value") is None:
                del node.attr[name]


class PassOrder:
    """The order in which each pass over a dataset reads it, wherever it is opened.

    Args:
        dataset: The dataset.
        graph: Its GraphDef.
    """

    def __init__(self, dataset, graph):
        keep_order(graph)
        self._graph = graph
        self._base = int(_fresh_seed()[0]) if compat.unseeded_steps(dataset) else None
        self._reshuffles = any(node.op in _WITH_SEED_GENERATOR for node in graph.node)
        self._unchanged = None if self.differs_by_pass else graph.SerializeToString()

    @property
    def differs_by_pass(self) -> bool:
        """True where passes read in different orders."""
        return self._base is not None or self._reshuffles

    def passes_to_skip(self, number: int) -> int:
        """Returns how often a new copy of the dataset must be opened before pass `number` comes up."""
        return number if self._reshuffles and self._base is None else 0

    def graph_of_pass(self, number: int) -> bytes:
        """Returns the serialized graph that a task opens for a pass, nothing in it shared with other copies."""
        if self._unchanged is not None:
            return self._unchanged
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(self._graph)
        if self._base is not None:
            graph = _with_seeds(graph, self._base, number)
        constants = {node.name: node for node in graph.node}
        for node in list(graph.node):
            if node.op in _WITH_SEED_GENERATOR and not _is_forgotten(constants, node):
                _forget_seed_generator(graph, constants, node)
        return graph.SerializeToString()

    def operations(self) -> list[str]:
        """Returns the types of the dataset operations in the graph."""
        return [node.op for node in self._graph.node if "Dataset" in node.op]


def _is_forgotten(constants, node) -> bool:
    return node.input[_WITH_SEED_GENERATOR[node.op]].endswith("_agreed_seed_generator")


def _fresh_seed() -> np.ndarray:
    return np.random.SeedSequence().generate_state(1).astype(np.int64)


def _seed(base: int, *path) -> int:
    digest = hashlib.blake2b(repr((base, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 2) + 1


def _with_seeds(graph, base: int, index: int):
    """Returns a copy of the dataset's GraphDef in which unseeded random ops have seeds of this pass."""
    seeded = tf.compat.v1.GraphDef()
    seeded.CopyFrom(graph)
    constants = {node.name: node for node in seeded.node}
    for number, node in enumerate(list(seeded.node)):
        if node.op.startswith(_SHUFFLES):
            # An order that is not reshuffled must be the same in each pass.
            fixed = "reshuffle_each_iteration" in node.attr and not node.attr["reshuffle_each_iteration"].b
            _seed_inputs(seeded, constants, node, _seed(base, 0 if fixed else index, number))
    for function in seeded.library.function:
        for number, node in enumerate(function.node_def):
            if compat.is_unseeded_random(node):
                node.attr["seed"].i = _seed(base, index, number)
                node.attr["seed2"].i = _seed(base, index, number, "second")
    return seeded


def _seed_inputs(graph, constants, node, seed: int) -> None:
    """Replaces the node's two seed inputs when both are the constant 0."""
    names = {
        "ShuffleDataset": (2, 3),
        "ShuffleDatasetV2": None,
        "ShuffleDatasetV3": (2, 3),
        "ShuffleAndRepeatDataset": (2, 3),
        "ShuffleAndRepeatDatasetV2": (2, 3),
        "RandomDataset": (0, 1),
        "RandomDatasetV2": (0, 1),
    }.get(node.op)
    if names is None:
        return
    originals = [constants.get(node.input[position]) for position in names]
    if any(c is None or c.op != "Const" or tf.make_ndarray(c.attr["value"].tensor) != 0 for c in originals):
        return
    for offset, (position, original) in enumerate(zip(names, originals, strict=True)):
        constant = graph.node.add()
        constant.CopyFrom(original)
        constant.name = f"{node.name.replace('/', '_')}_agreed_seed_{offset}"
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(seed + offset, tf.int64))
        node.input[position] = constant.name
    if node.op in _WITH_SEED_GENERATOR:
        _forget_seed_generator(graph, constants, node)


def _forget_seed_generator(graph, constants, node) -> None:
    """Renames the generator that a reshuffling dataset draws from.

    The original one exists and was seeded by chance, so the seed inputs would count for nothing. One of a name
    that nobody knows is made from them.
    """
    position = _WITH_SEED_GENERATOR[node.op]
    constant = graph.node.add()
    constant.CopyFrom(constants[node.input[position]])
    constant.name = f"{node.name.replace('/', '_')}_agreed_seed_generator"
    (handle,) = constant.attr["value"].tensor.resource_handle_val
    handle.name = f"tfdist_ext/seed_generator/{next(_generators)}"
    node.input[position] = constant.name
