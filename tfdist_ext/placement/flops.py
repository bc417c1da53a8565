"""How many floating-point operations does an operation take? TensorFlow's count where it has one, else ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import compat

# They move or describe data and compute nothing.
_NONE = frozenset({
    "Const", "Placeholder", "Identity", "IdentityN", "NoOp", "ReadVariableOp", "VarHandleOp", "AssignVariableOp",
    "Reshape", "Shape", "ShapeN", "Size", "Rank", "StridedSlice", "Slice", "ConcatV2", "Pack", "Unpack",
    "ExpandDims", "Squeeze", "Split", "SplitV", "Gather", "GatherV2", "GatherNd", "ResourceGather", "Transpose",
    "Tile", "Fill", "ZerosLike", "OnesLike", "BroadcastTo", "StopGradient", "PreventGradient", "Range", "Cast", "Pad",
    "PadV2", "Where",
    "VariableShape", "BroadcastGradientArgs", "ConcatOffset", "TensorListPushBack", "TensorListPopBack",
    "EmptyTensorList", "TensorListReserve", "TensorListSetItem", "TensorListGetItem", "Assert",
})  # fmt: skip
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "UnsortedSegmentSum", "L2Loss", "AddN")
# Filters come second; for the gradient by the filter they are what comes out.
_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative", "Conv3D")


def flops_of(op, input_shapes: Sequence[tf.TensorShape], output_shapes: Sequence[tf.TensorShape]) -> float:
    """Counts one run of an operation; a multiplication and an addition are two.

    Args:
        op: `tf.Operation`.
        input_shapes: Of its inputs, with the batch that is assumed.
        output_shapes: Of its outputs.

    Returns:
        The number; 0 where shapes are unknown. An operation that nobody has a count for takes one for each element
        that it makes.
    """
    if op.type in _NONE:
        return 0.0
    made = sum(shape.num_elements() for shape in output_shapes if shape.is_fully_defined())
    # TensorFlow counts the gradients of a convolution with the zeros around the image.
    counted = _product(op, input_shapes, output_shapes, made)
    if counted is None and all(
        assumed.rank == tensor.shape.rank
        and (assumed.rank is None or assumed.as_list() == tensor.shape.as_list())
        for assumed, tensor in zip(input_shapes, op.inputs, strict=True)
    ):
        counted = compat.registered_flops(op)
    if counted is None and op.type in _REDUCTIONS:
        counted = sum(shape.num_elements() for shape in input_shapes if shape.is_fully_defined())
    return float(made if counted is None else counted)


def _product(op, input_shapes, output_shapes, made: int) -> float | None:
    """Counts products; None for other operations."""
    if op.type in ("MatMul", "BatchMatMulV2", "BatchMatMul", "BatchMatMulV3"):
        transposed = _flag(op, "transpose_a") or _flag(op, "adj_x")
        depth = input_shapes[0][-2 if transposed else -1] if input_shapes[0].rank else None
        return 2.0 * made * (depth or 0)
    if op.type in _CONVOLUTIONS:
        kernel = input_shapes[1]
        reads = kernel[:-2] if op.type.startswith("Depthwise") else kernel[:-1]
        return 2.0 * made * (reads.num_elements() or 0) if kernel.is_fully_defined() else 0.0
    if op.type in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        gradient, kernel = input_shapes[2], _filter_of_gradient(op, input_shapes, output_shapes)
        if gradient.is_fully_defined() and kernel.is_fully_defined():
            return 2.0 * gradient.num_elements() * kernel[:-1].num_elements()
        return 0.0
    if op.type == "Einsum":
        return _einsum(op.get_attr("equation").decode(), input_shapes)
    return None


def _filter_of_gradient(op, input_shapes, output_shapes) -> tf.TensorShape:
    return input_shapes[1] if op.type == "Conv2DBackpropInput" else output_shapes[0]


def _einsum(equation: str, input_shapes) -> float:
    """Counts two for each combination of the labels; an ellipsis counts with the sizes behind it."""
    sizes: dict[str, int] = {}
    for labels, shape in zip(equation.split("->")[0].split(","), input_shapes, strict=True):
        if not shape.is_fully_defined():
            return 0.0
        before, dots, after = labels.strip().partition("...")
        dims = shape.as_list()
        named = list(zip(before, dims, strict=False))
        named += list(zip(after, dims[len(dims) - len(after) :], strict=True)) if dots else []
        sizes.update(named)
        if dots:
            sizes["..."] = max(sizes.get("...", 1), math.prod(dims[len(before) : len(dims) - len(after)]))
    return 2.0 * math.prod(sizes.values())


def _flag(op, name: str) -> bool:
    return name in op.node_def.attr and op.node_def.attr[name].b
