"""Trains, evaluates, predicts, saves and loads in a worker process, and returns plain values."""

import dataclasses
import gc
import os
import pathlib
import tempfile
import traceback

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext
from tests.conformance.places import PLACES

EPOCHS = 2
MANY_LAYERS = 40
PACKAGE = str(pathlib.Path(tfdist_ext.__file__).parent)


def run_items(place, program, items, folder=""):
    """Returns item -> what was seen of it, or its error; what fails together is tried apart."""
    from tests.conformance.programs import PROGRAMS

    keras.config.set_floatx("float64")
    return _tried(dataclasses.replace(PLACES[place], folder=folder), PROGRAMS[program], tuple(items))


def _tried(place, program, items):
    try:
        return program.run(place, items)
    except Exception as error:
        if len(items) == 1:
            return {items[0]: error_of(error)}
    finally:
        keras.backend.clear_session()
        gc.collect()
    middle = len(items) // 2
    return {**_tried(place, program, items[:middle]), **_tried(place, program, items[middle:])}


def error_of(error):
    """Returns an exception as plain values: where it was raised says whether the package refused."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    text = str(error)
    return {"error": type(error).__name__, "message": text[:3000], "ours": raised_in.startswith(PACKAGE)}


def dataset_of(place, arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(place.batch_rows)


def fitted(place, make, arrays, *, evaluates=True, saves=True, epochs=EPOCHS, **fit_arguments):
    """Trains a model; returns it and what was seen of it: at a place that is not thorough, of training alone."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    strategy = place.make()
    with place.scope(strategy):
        model = make()
    seen = {"initial": variables_of(model)}
    data = arrays if isinstance(arrays, tf.data.Dataset) else dataset_of(place, arrays)
    history = model.fit(data, epochs=epochs, verbose=0, **fit_arguments).history
    seen["history"] = plain(history)
    seen["weights"] = variables_of(model)
    seen["optimizer"] = optimizer_of(model)
    if evaluates and place.thorough:
        seen["evaluation"] = plain(model.evaluate(data, verbose=0, return_dict=True))
    if place.thorough:
        predictions = model.predict(data, verbose=0)
        seen["predictions"] = plain(predictions)
        # One device shows only what another place is compared with.
        if saves and strategy is not None:
            seen["saved"] = _saved_and_loaded(place, strategy, model, data, predictions)
    return model, seen


def variables_of(model):
    return {v.path: np.asarray(v.numpy()) for v in model.variables if "seed_generator_state" not in v.path}


def optimizer_of(model):
    """Returns the optimizer's variables: those that belong to weights under the weights' paths."""
    found, paths = {}, [v.path for v in model.trainable_variables]
    for index, variable in enumerate(model.optimizer.variables):
        owner = next((p for p in paths if f"/{p.replace('/', '_')}" in variable.path), "optimizer")
        found[f"{owner}/{index}"] = np.asarray(variable.numpy())
    return found


def plain(values):
    """Returns nested dictionaries of arrays."""
    if isinstance(values, dict):
        return {str(name): plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)) and values and not np.isscalar(values[0]):
        return {str(index): plain(value) for index, value in enumerate(values)}
    return np.asarray(values)


def _saved_and_loaded(place, strategy, model, data, predictions):
    """Saves, loads outside and inside of the scope; returns how far weights and predictions are from the model's."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        outside = keras.models.load_model(path, safe_mode=False)
        with place.scope(strategy):
            inside = keras.models.load_model(path, safe_mode=False)
    found = {
        "outside": _apart(model, outside),
        "inside": _apart(model, inside),
        "predictions outside": _far(_called(outside, data), predictions),
    }
    if len(model.layers) < MANY_LAYERS:
        # To trace many branches once more takes long; their weights and the call outside are compared.
        found["predictions inside"] = _far(inside.predict(data, verbose=0), predictions)
    return found


def _called(model, data):
    """Returns what a model says about all rows, without a function to be traced."""
    found = [model(batch[0], training=False) for batch in data]
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *found)


def _far(found, predictions):
    # What is loaded may give a list for a tuple.
    return keras.tree.map_structure(lambda a, b: np.abs(a - b), plain(found), plain(predictions))


def _apart(model, loaded):
    """Returns how far each variable is from the one in its place: names may be counted on."""
    pairs = zip(variables_of(model).items(), variables_of(loaded).values(), strict=True)
    return {path: np.abs(value - other).max(initial=0.0) for (path, value), other in pairs}
