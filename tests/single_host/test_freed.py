"""What is deleted is freed, with the graphs that were traced of it."""

import gc
import weakref

import tensorflow as tf

import tfdist_ext


def num_graphs():
    gc.collect()
    return sum(type(one).__name__ == "FuncGraph" for one in gc.get_objects())


def test_h15_functions_that_ran_on_replicas_are_freed_with_their_graphs():
    strategy = tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])

    def run_one():
        function = tf.function(lambda value: 2.0 * value)
        results = [strategy.run(function, args=(tf.constant(number),)) for number in (1.0, 2.0)]
        assert [[float(one) for one in strategy.experimental_local_results(each)] for each in results] == [
            [2.0, 2.0],
            [4.0, 4.0],
        ]
        return weakref.ref(function)

    run_one()
    before = num_graphs()
    functions = [run_one() for _ in range(3)]
    assert num_graphs() == before
    assert not any(function() for function in functions)
