"""Recipes for callbacks: each in a small fit, known by its effects."""

import contextlib
import csv
import http.server
import io
import json
import os
import pathlib
import re
import tempfile
import threading
import urllib.parse

import keras
import numpy as np

from tests.conformance import recipes_optimizers, runs


def _model(place, optimizer=None):
    keras.backend.clear_session()
    keras.utils.set_random_seed(11)
    with place.scope(place.make()):
        return recipes_optimizers.network(optimizer() if optimizer else keras.optimizers.SGD(0.1), ["mae"])


def _fit(place, model, callbacks, epochs=3, arrays=None, **arguments):
    data = runs.dataset_of(place, arrays or recipes_optimizers.rows())
    return model.fit(data, epochs=epochs, verbose=0, validation_data=data, callbacks=callbacks, **arguments)


def _seen(model, history, **effects):
    return {
        "weights": runs.variables_of(model),
        "history": runs.plain(history.history),
        **runs.plain(effects),
    }


def _plainly(make, optimizer=None, **arguments):
    """Returns a recipe for a callback whose effect is on weights and logs."""

    def run(place):
        model = _model(place, optimizer)
        return _seen(
            model, _fit(place, model, [make()], **arguments), rate=model.optimizer.learning_rate.numpy()
        )

    return run


def _in_folder(run):
    def within(place):
        with tempfile.TemporaryDirectory() as folder:
            return run(place, pathlib.Path(folder))

    return within


class Recorder(keras.callbacks.Callback):
    """Keeps which of its methods were called, and the logs of the epochs."""

    def __init__(self):
        super().__init__()
        self.calls, self.logs = [], []

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch}")
        self.logs.append([logs[name] for name in sorted(logs)])

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(f"batch {batch}")
        self.logs.append([logs[name] for name in sorted(logs)])

    def on_test_end(self, logs=None):
        self.calls.append("test")


class Cut(Exception):
    """Stands for the end of a process."""


class _CutAt(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise Cut


def _recorded(place):
    model, recorder = _model(place), Recorder()
    history = _fit(place, model, [recorder])
    return _seen(model, history, logs=np.concatenate(recorder.logs), calls=np.array(recorder.calls))


def _listed(place):
    model, recorder = _model(place), Recorder()
    callbacks = keras.callbacks.CallbackList([recorder], add_history=True, model=model)
    history = _fit(place, model, callbacks)
    return _seen(model, history, logs=np.concatenate(recorder.logs))


def _resumed(place, folder):
    with contextlib.suppress(Cut):
        _fit(place, _model(place), [keras.callbacks.BackupAndRestore(folder / "backup"), _CutAt(2)])
    model = _model(place)
    return _seen(model, _fit(place, model, [keras.callbacks.BackupAndRestore(folder / "backup")]))


def _table(place, folder):
    model = _model(place)
    history = _fit(place, model, [keras.callbacks.CSVLogger(str(folder / "log.csv"))])
    rows = list(csv.reader((folder / "log.csv").open()))
    return _seen(model, history, columns=np.array(rows[0]), rows=np.array(rows[1:], dtype="float64"))


def _checkpointed(place, folder):
    model = _model(place)
    saving = keras.callbacks.ModelCheckpoint(str(folder / "{epoch}.keras"), monitor="loss")
    history = _fit(place, model, [saving])
    files = sorted(os.listdir(folder))
    written = {name: runs.variables_of(keras.models.load_model(folder / name)) for name in files}
    return _seen(model, history, written=written)


def _printed(place):
    model, output = _model(place), io.StringIO()
    with contextlib.redirect_stdout(output):
        _fit(place, model, [keras.callbacks.ProgbarLogger()])
    numbers = re.findall(r"val_loss: ([\d.]+)", output.getvalue())
    return {"numbers": np.array(numbers, dtype="float64")}


def _posted(place):
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            received.append(json.loads(urllib.parse.parse_qs(body)["data"][0]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = _model(place)
        history = _fit(
            place, model, [keras.callbacks.RemoteMonitor(f"http://127.0.0.1:{server.server_port}")]
        )
        server.shutdown()
    return _seen(model, history, posted=[[line[name] for name in sorted(line)] for line in received])


def _not_a_number(place):
    features, targets = recipes_optimizers.rows()
    targets[7] = np.inf
    model, recorder = _model(place), Recorder()
    _fit(place, model, [keras.callbacks.TerminateOnNaN(), recorder], arrays=(features, targets))
    return {"epochs": np.array([call for call in recorder.calls if call.startswith("epoch")])}


def _own_history(place):
    model, own = _model(place), keras.callbacks.History()
    history = _fit(place, model, [own])
    return _seen(model, history, own=own.history)


def _lambda(place):
    model, found = _model(place), []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: found.append(logs["loss"]))
    return _seen(model, _fit(place, model, [callback]), found=np.array(found))


K = keras.callbacks
CALLBACKS = {
    "BackupAndRestore": _in_folder(_resumed),
    "CSVLogger": _in_folder(_table),
    "Callback": _recorded,
    "CallbackList": _listed,
    "EarlyStopping": _plainly(
        lambda: K.EarlyStopping("loss", min_delta=10.0, patience=1, restore_best_weights=True), epochs=5
    ),
    "History": _own_history,
    "LambdaCallback": _lambda,
    "LearningRateScheduler": _plainly(
        lambda: K.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 2))
    ),
    "ModelCheckpoint": _in_folder(_checkpointed),
    "ProgbarLogger": _printed,
    "ReduceLROnPlateau": _plainly(
        lambda: K.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0)
    ),
    "RemoteMonitor": _posted,
    "SwapEMAWeights": _plainly(
        lambda: K.SwapEMAWeights(swap_on_epoch=True),
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
    ),
    "TerminateOnNaN": _not_a_number,
}
