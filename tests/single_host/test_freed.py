"""What is deleted is freed, with the graphs that were traced of it."""

import weakref

import tensorflow as tf

import tfdist_ext
from tests.single_host.freed_programs import left_of_models, num_graphs


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


def test_h15_models_are_freed_with_their_graphs():
    assert left_of_models(tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])) == (0, 0)
