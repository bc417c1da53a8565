"""The loop on parameter servers: each worker computes whole batches, and a policy says how stale gradients may be.

The lines after `# tfdist_ext:` are all that differs from TensorFlow's own `ClusterCoordinator` loop.
"""

import os

import keras
import tensorflow as tf

# tfdist_ext:
import tfdist_ext
from examples.custom_loop.model import (
    STEPS_PER_EPOCH,
    MeanOfEpoch,
    evaluate,
    losses_of_rows,
    make_model,
    make_optimizer,
    training_data,
)
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState

STEPS_PER_ROUND = 15  # Scheduled together; the chief looks at them, and may save, when all are applied.


def make_step(model, optimizer):
    """Returns a function that trains on the next batch of an iterator."""

    def step(iterator):
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            losses = losses_of_rows(model, images, labels)
            # No other gradient is added to this one.
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        # tfdist_ext: sent to the parameter servers, and applied when the policy admits it.
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def train(directory, epochs, update_policy):
    """Trains to the end, from the newest checkpoint if there is one.

    Runs on: every task of a cluster; workers and parameter servers serve, and do not come back from the strategy's
    constructor.

    Args:
        directory: For the checkpoints.
        epochs: Passes over the training images.
        update_policy: Such as `tfdist_ext.BoundedStaleness(4)`.

    Returns:
        The loss of each step that this process did, test results, and what the policy did.
    """
    keras.utils.set_random_seed(1)
    # tfdist_ext: without TF_CONFIG, two workers and a parameter server inside this process.
    cluster = None if "TF_CONFIG" in os.environ else tfdist_ext.cluster.in_process(num_workers=2, num_ps=1)
    strategy = tfdist_ext.ParameterServerStrategy(cluster, update_policy=update_policy)
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
    # tfdist_ext: each batch goes to one worker, so that an epoch has each row once.
    dataset = strategy.experimental_distribute_dataset(training_data())
    mean_loss = MeanOfEpoch()
    # tfdist_ext: model, optimizer and place in the data are known; the mean is given, as anything with state_dict().
    state = TrainingState(model, dataset, optimizer=optimizer, mean_loss=mean_loss)
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(STEPS_PER_ROUND))
    coordinator = tfdist_ext.ClusterCoordinator(strategy)
    step = make_step(model, optimizer)

    step_losses = []
    # tfdist_ext:
    checkpoints.restore_or_initialize()
    batches = coordinator.create_per_worker_dataset(state.dataset)
    for epoch in range(state.epoch, epochs):
        state.epoch = epoch
        iterator = iter(batches)
        end = (epoch + 1) * STEPS_PER_EPOCH
        while state.step < end:
            count = min(STEPS_PER_ROUND, end - state.step)
            results = [coordinator.schedule(step, args=(iterator,)) for _ in range(count)]
            coordinator.join()
            for loss in coordinator.fetch(results):
                step_losses.append(float(loss))
                mean_loss.add(loss)
            # tfdist_ext:
            checkpoints.save_if_due(state.step + count)
        print(f"epoch {epoch + 1}: loss {mean_loss.take():.6f}", flush=True)
    state.epoch = epochs
    checkpoints.save(wait=True)
    # Nothing is counted where nothing was left to train.
    statistics = strategy.statistics.get("total")
    return {"step_losses": step_losses, **evaluate(model), "statistics": statistics}
