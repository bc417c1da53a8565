"""A training script as a user writes it, the same on every task of the cluster: `python resume.py DIR STEP`.

The chief says when it is at that step.
"""

import pathlib
import sys

import keras

import tfdist_ext
from tests.parameter_server.counting import counting_model, counts, rows, say
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState

NUM_ROWS = 80

directory, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
strategy = tfdist_ext.ParameterServerStrategy(update_policy=tfdist_ext.Asynchronous())
model = counting_model(strategy, NUM_ROWS)
# 40 batches an epoch.
state = TrainingState(model, rows(NUM_ROWS, delay_seconds=0.01))
checkpoints = TrainingCheckpointManager(state, directory / "checkpoints", save=EverySteps(10))


class SayWhere(keras.callbacks.Callback):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def on_train_batch_end(self, batch, logs=None):
        if int(model.optimizer.iterations) == step:
            say("at the step")


model.fit(state.dataset, epochs=2, verbose=0, callbacks=[checkpoints.keras_callback(), SayWhere()])
say("counts", counts(model), "iterations", int(model.optimizer.iterations))
