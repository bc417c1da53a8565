"""Models that are made, used and deleted; what of them stays?"""

import gc
import weakref

import keras
import numpy as np
import tensorflow as tf


def num_graphs():
    """Returns how many graphs Python still holds."""
    gc.collect()
    return sum(type(one).__name__ == "FuncGraph" for one in gc.get_objects())


def left_of_models(strategy):
    """Uses and deletes three models; returns how many graphs and models the last two left."""
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 1)))).batch(4)

    def use_one():
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(data, verbose=0)
        model.evaluate(data, verbose=0)
        model.predict(data, verbose=0)
        reference = weakref.ref(model)
        del model
        keras.backend.clear_session()
        return reference

    use_one()
    before = num_graphs()
    models = [use_one() for _ in range(2)]
    return num_graphs() - before, sum(model() is not None for model in models)
