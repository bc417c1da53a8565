"""The loop, synchronously: all replicas compute a part of each batch, and apply the sum of their gradients.

The lines after `# tfdist_ext:` are all that differs from a loop for one device.
"""

import keras
import tensorflow as tf

# tfdist_ext:
import tfdist_ext
from examples.custom_loop.model import (
    BATCH_SIZE,
    MeanOfEpoch,
    evaluate,
    losses_of_rows,
    make_model,
    make_optimizer,
    training_data,
)
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState


def make_step(strategy, model, optimizer):
    """Returns a function that trains on one global batch, and returns its loss."""

    def step(batch):
        images, labels = batch
        with tf.GradientTape() as tape:
            losses = losses_of_rows(model, images, labels)
            # Gradients are summed over replicas, so each must be divided by the rows of all, not by its own.
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_step(batch):
        # tfdist_ext: `step` runs on each replica, with its rows of the batch; the parts of the loss add up.
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    return distributed_step


def train(directory, epochs):
    """Trains to the end, from the newest checkpoint if there is one.

    Args:
        directory: For the checkpoints.
        epochs: Passes over the training images.

    Returns:
        The loss of each step that this process did, and test results.
    """
    keras.utils.set_random_seed(1)
    # tfdist_ext: on one device without TF_CONFIG.
    strategy = tfdist_ext.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
        optimizer = make_optimizer(model)
    # tfdist_ext: every worker takes its rows of each batch.
    dataset = strategy.experimental_distribute_dataset(training_data())
    mean_loss = MeanOfEpoch()
    # tfdist_ext: model, optimizer and place in the data are known; the mean is given, as anything with state_dict().
    state = TrainingState(model, dataset, optimizer=optimizer, mean_loss=mean_loss)
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(20))
    step = make_step(strategy, model, optimizer)

    step_losses = []
    # tfdist_ext:
    checkpoints.restore_or_initialize()
    for epoch in range(state.epoch, epochs):
        state.epoch = epoch
        # tfdist_ext: begins with the first batch that was not read before the restore.
        for batch in state.dataset:
            step_losses.append(float(step(batch)))
            mean_loss.add(step_losses[-1])
            checkpoints.save_if_due(state.step + 1)
        print(f"epoch {epoch + 1}: loss {mean_loss.take():.6f}", flush=True)
    state.epoch = epochs
    checkpoints.save(wait=True)
    return {"step_losses": step_losses, **evaluate(model)}
