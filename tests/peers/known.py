"""Which of Keras' own tests cannot pass under a strategy, and why?"""

# Place or None for both, a part of the test's name, a part of its error, the reason.
KNOWN = (
    (None, "::", "was made outside the scope", "It makes its model before the scope is entered: refused by name."),
    (None, "CircleTest", "pop from empty list", "It clears Keras' session, and with it TensorFlow's scopes."),
    (
        "mirrored",
        "OptimizerSparseTest",
        "False != True",
        "It watches the methods of TensorFlow's variable class, which a mirrored variable is not.",
    ),
    (
        None,
        "test_swap_ema_weights_with_tf_distribute",
        "Mixing different tf.distribute.Strategy",
        "It makes a strategy of TensorFlow's inside of ours.",
    ),
)  # fmt: skip


def reason_of(place, name, words):
    """Returns why a test of Keras fails at a place, or None where nobody knows."""
    for where, part, error, reason in KNOWN:
        if where in (None, place) and part in name and error in words:
            return reason
    return None
