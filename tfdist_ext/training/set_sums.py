"""How do the sets of a step become one sum, and two sets of one worker one set?"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist_ext.strategies import frame as frames
from tfdist_ext.training.gradient_set import FIRST_PS, DenseParts, ReceivedSet, SetLayout
from tfdist_ext.training.pulled import owner_of_rows, shards_of
from tfdist_ext.training.recorder import at_path


def sum_gradients(sets: Sequence[ReceivedSet], shares, application: int, index: int) -> list:
    """Returns the gradient of a variable over the sets of a step, summed in their order.

    Args:
        sets: The sets in slot order.
        shares: Function of a set's position and a dtype, its scalar share, or None for a single set.
        application: Which optimizer.
        index: Which of its variables.

    Returns:
        One tensor or `tf.IndexedSlices` for each shard.
    """
    per_set = [received.gradient(application, index) for received in sets]
    if shares is None:
        return per_set[0]
    return [_weighted_sum(parts, shares) for parts in zip(*per_set, strict=True)]


def _weighted_sum(parts, shares):
    if not isinstance(parts[0], tf.IndexedSlices):
        total = parts[0] * shares(0, parts[0].dtype)
        for position, part in enumerate(parts[1:], start=1):
            total = total + part * shares(position, part.dtype)
        return total
    values = tf.concat([p.values * shares(i, p.values.dtype) for i, p in enumerate(parts)], axis=0)
    rows = tf.concat([part.indices for part in parts], axis=0)
    unique, positions = tf.unique(rows, out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(values, positions, tf.size(unique, out_type=tf.int64))
    return tf.IndexedSlices(tf.ensure_shape(summed, [None, *values.shape[1:]]), unique, parts[0].dense_shape)


def new_values(layout: SetLayout, sets: Sequence[ReceivedSet], shares, of_losses, is_fresh: bool) -> list:
    """Returns `(variable, new value)` for everything that layers and metrics assigned.

    Totals (aggregation "sum", as in metrics) add up. Other floats of fresh sets become the mean of what the sets
    assigned, weighted by rows; a stale set did not see the present value, so that its change is added instead.
    Integers that count rows add up, others move on as one set moved them.

    Args:
        layout: The layout of the sets.
        sets: The sets of the step, in slot order.
        shares: As in `sum_gradients`, by rows.
        of_losses: As in `sum_gradients`, the shares of gradients.
        is_fresh: True when every set was computed on the present version.
    """
    results = []
    for index, (variable, _, change) in enumerate(layout.updates):
        with tf.device(shards_of(variable)[0].device):
            current = tf.convert_to_tensor(variable._value)
            way = layout.ways.get(id(variable))
            if change is None:
                value = sets[0].new_value(index)
            elif way == "averaged" and shares is not None:
                value = current + _mean([s.change(index) for s in sets], shares)
            elif way == "of rows" and of_losses is not None:
                value = current + _of_rows(sets, index, of_losses)
            elif way == "add" and is_fresh:
                value = tf.add_n([received.new_value(index) for received in sets])
            elif way == "sum" or variable.aggregation == "sum" or id(variable) in layout.counted:
                value = current
                for received in sets:
                    value = value + received.change(index)
            else:
                value = _moved(
                    current, [(s.new_value(index), s.change(index)) for s in sets], shares, is_fresh
                )
            results.append((variable, tf.cast(value, variable._value.dtype)))
    return results


def _moved(current, pairs, shares, is_fresh: bool):
    averages = shares is not None and current.dtype.is_floating
    if not averages:
        new, change = pairs[0]
        return new if is_fresh else current + change
    mean = _mean([new if is_fresh else change for new, change in pairs], shares)
    return mean if is_fresh else current + mean


def _of_rows(sets, index: int, shares):
    changes = [tf.math.divide_no_nan(tf.cast(s.change(index), tf.float64), s.rows) for s in sets]
    total = tf.add_n([received.rows for received in sets])
    return tf.cast(total * _weighted_sum(changes, shares), sets[0].change(index).dtype)


def _mean(values, shares):
    # In double precision, so that what all sets agree on stays exactly that.
    mean = _weighted_sum([tf.cast(value, tf.float64) for value in values], shares)
    return tf.cast(mean, values[0].dtype)


def draw_logs(layout: SetLayout, sets: Sequence[ReceivedSet], shares, updated) -> object:
    """Returns the logs of a step: metric results after the update, other values averaged over the sets.

    Args:
        layout: The layout of the sets.
        sets: The sets of the step, in slot order.
        shares: As in `sum_gradients`.
        updated: `(variable, value)` pairs of the update.
    """
    results: dict = {}
    new = [(variable, value) for variable, value in updated if isinstance(variable, keras.Variable)]

    def draw(leaf):
        what, *rest = leaf.entry
        if what == "constant":
            return rest[0]
        if what == "value":
            return _log_of_sets([received.log(rest[0]) for received in sets], shares)
        metric, path = rest
        if id(metric) not in results:
            results[id(metric)] = metric.result()
        return at_path(results[id(metric)], path)

    with keras.StatelessScope(state_mapping=new, initialize_variables=False), frames.entered(None):
        return tf.nest.map_structure(draw, layout.logs)


def _log_of_sets(values, shares):
    if shares is None:
        return values[0]
    if values[0].dtype.is_floating:
        return _weighted_sum(values, shares)
    return tf.add_n(values) if values[0].dtype.is_integer else values[0]


def shares_of(sets: Sequence[ReceivedSet], fixed_share: float | None = None):
    """Returns the function of a set's position and a dtype that gives its part of the step; None for all of it.

    Args:
        sets: The sets in slot order.
        fixed_share: The share of every set, where losses are sums and were multiplied by its inverse.
    """
    if fixed_share is not None:
        return lambda position, dtype: tf.constant(fixed_share, dtype)
    if len(sets) == 1:
        return None
    with tf.device(FIRST_PS):
        weights = [received.weight for received in sets]
        total = tf.add_n(weights)
        # Where every row is masked all losses are zero, but not what regularizes.
        alike = tf.constant(1 / len(sets), total.dtype)
        shares = [tf.where(total == 0, alike, tf.math.divide_no_nan(weight, total)) for weight in weights]
    return lambda position, dtype: tf.cast(shares[position], dtype)


def sharded_whole(parts: Sequence[tf.Tensor]):
    """Returns the whole gradient of a variable whose shards' parts are given, sparse ones with global rows."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.concat(parts, axis=0)
    starts, start = [], tf.constant(0, parts[0].indices.dtype)
    for part in parts:
        starts.append(start)
        start = start + tf.cast(part.dense_shape[0], start.dtype)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat([part.indices + begin for part, begin in zip(parts, starts, strict=True)], axis=0),
        tf.concat([[tf.cast(start, tf.int64)], parts[0].dense_shape[1:]], axis=0),
    )


def split_whole(variable, gradient) -> list:
    """Returns one gradient for each shard of a variable, out of the gradient of the whole of it."""
    shards = shards_of(variable)
    if len(shards) == 1:
        return [gradient]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, [shard.shape[0] for shard in shards])
    owner, local = owner_of_rows(shards, gradient.indices)
    values = tf.dynamic_partition(gradient.values, owner, len(shards))
    rows = tf.dynamic_partition(local, owner, len(shards))
    shapes = [tf.constant(shard.shape.as_list(), tf.int64) for shard in shards]
    return [tf.IndexedSlices(v, r, s) for v, r, s in zip(values, rows, shapes, strict=True)]


def joined(first: ReceivedSet, second: ReceivedSet) -> list[tf.Tensor]:
    """Returns the tensors of one set that says what two sets of one worker and one base version say.

    Gradients are summed (Downpour's accrued gradient), changes of variables add up, and logs are averaged by rows.

    Args:
        first: The earlier set.
        second: The later one.
    """
    layout = first.layout
    tensors = list(first.tensors)
    for gradients in layout.gradient_parts:
        for slot in gradients:
            if isinstance(slot, DenseParts):
                for position in slot.positions:
                    tensors[position] = first.tensors[position] + second.tensors[position]
                continue
            for values, rows in slot.positions:
                tensors[values], tensors[rows] = _sum_rows(first, second, values, rows)
    for _, new, change in layout.updates:
        if change is None:
            tensors[new] = second.tensors[new]
        else:
            tensors[new] = first.tensors[new] + second.tensors[change]
            tensors[change] = first.tensors[change] + second.tensors[change]
    for leaf in tf.nest.flatten(layout.logs):
        if leaf.entry[0] == "value":
            position = leaf.entry[1]
            tensors[position] = _mean_log(first, second, position)
    for scale in layout.scale_positions:
        if scale is not None:
            tensors[scale] = tf.maximum(first.tensors[scale], second.tensors[scale])
    tensors[layout.weight_position] = first.weight + second.weight
    return tensors


def _sum_rows(first, second, values, rows):
    indices = tf.concat([first.tensors[rows], second.tensors[rows]], axis=0)
    both = tf.concat([first.tensors[values], second.tensors[values]], axis=0)
    unique, positions = tf.unique(indices, out_idx=tf.int64)
    summed = tf.math.unsorted_segment_sum(both, positions, tf.size(unique, out_type=tf.int64))
    return tf.ensure_shape(summed, [None, *both.shape[1:]]), unique


def _mean_log(first, second, position):
    one, other = first.tensors[position], second.tensors[position]
    if not one.dtype.is_floating:
        return one + other if one.dtype.is_integer else other
    total = first.weight + second.weight
    return one * tf.cast(first.weight / total, one.dtype) + other * tf.cast(second.weight / total, one.dtype)
