"""Floating-point operations are what they are by hand: two for each multiplication with its addition."""

import pytest
import tensorflow as tf

from tfdist_ext.placement import explain


def flops(function, *shapes, **options):
    report = explain(function, *(tf.TensorSpec(shape) for shape in shapes), **options)
    return sum(row.flops for row in report.devices)


CASES = {
    "product": (lambda a, b: tf.matmul(a, b), [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
    "transposed": (lambda a, b: tf.matmul(a, b, transpose_a=True), [(4, 3), (4, 5)], 2 * 3 * 4 * 5),
    "batch of products": (lambda a, b: tf.matmul(a, b), [(7, 3, 4), (7, 4, 5)], 7 * 2 * 3 * 4 * 5),
    "einsum": (lambda a, b: tf.einsum("bij,bjk->bik", a, b), [(7, 3, 4), (7, 4, 5)], 7 * 2 * 3 * 4 * 5),
    "heads": (lambda a, b: tf.einsum("...d,dhk->...hk", a, b), [(2, 6, 8), (8, 3, 5)], 2 * 2 * 6 * 8 * 3 * 5),
    # Without padding 8 x 8 becomes 6 x 6; each of 5 outputs reads 3 x 3 x 2.
    "convolution": (lambda x, k: tf.nn.conv2d(x, k, 1, "VALID"), [(4, 8, 8, 2), (3, 3, 2, 5)], 2 * 4 * 36 * 5 * 18),
    # 2 channels with 3 filters each: 6 outputs that read 3 x 3.
    "by channel": (
        lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "VALID"), [(4, 8, 8, 2), (3, 3, 2, 3)],
        2 * 4 * 36 * 6 * 9,
    ),
    "elementwise": (lambda a, b: a * b, [(3, 4), (3, 4)], 12),
    "moved only": (lambda a: tf.transpose(tf.reshape(a, [4, 3])), [(3, 4)], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    function, shapes, expected = CASES[name]
    assert flops(function, *shapes) == expected


def test_a_gradient_of_a_product_takes_two_more():
    def function(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            c = tf.matmul(a, b)
        return tape.gradient(c, [a, b])

    # Three products of the same size; the ones that the gradient begins with are constant.
    assert flops(function, (3, 4), (4, 5)) == 3 * 2 * 3 * 4 * 5


def test_gradients_of_a_convolution_take_as_much_each_as_the_convolution():
    def function(x, kernel):
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.nn.conv2d(x, kernel, 1, "VALID")
        return tape.gradient(y, [x, kernel])

    assert flops(function, (4, 8, 8, 2), (3, 3, 2, 5)) == 3 * 2 * 4 * 36 * 5 * 18


def test_an_assumed_batch_counts_like_a_real_one():
    def function(x):
        return tf.nn.conv2d(tf.matmul(x, tf.ones([6, 2])), tf.ones([1, 1, 2, 3]), 1, "SAME")

    assert flops(function, (None, 5, 5, 6), assume_batch=4) == flops(function, (4, 5, 5, 6))
    # Products 6 by 2, then 2 by 3, for each of 4 x 5 x 5.
    assert flops(function, (4, 5, 5, 6)) == 100 * (2 * 6 * 2 + 2 * 2 * 3)
