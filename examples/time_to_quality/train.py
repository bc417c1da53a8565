"""Trains the click model of `examples/click_ranking` under one policy, with a slow worker, against the clock."""

import dataclasses
import time

import keras
import tensorflow as tf

# tfdist_ext:
import tfdist_ext
from examples.click_ranking import clicks, quality
from examples.click_ranking.train import NUM_TEST_ROWS, make_model
from examples.time_to_quality import slow_worker

MAX_STALENESS = 16
# tfdist_ext: the arguments of the strategy; None is one device.
POLICIES = {
    "one device": None,
    "synchronous": {"update_policy": tfdist_ext.Synchronous()},
    "backup": {"update_policy": tfdist_ext.Synchronous(num_backup_workers=1)},
    "backup, requeued": {
        "update_policy": tfdist_ext.Synchronous(num_backup_workers=1),
        "requeue_dropped": True,
    },
    "bounded": {"update_policy": tfdist_ext.BoundedStaleness(MAX_STALENESS)},
    "bounded, late dropped": {"update_policy": tfdist_ext.BoundedStaleness(MAX_STALENESS, late="drop")},
    "asynchronous": {"update_policy": tfdist_ext.Asynchronous()},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, the same under each policy.

    Attributes:
        num_workers: Workers; the last one is slow.
        num_sets: Sets of gradients, each of one batch, that are applied in all.
        batch_size: Rows of a set.
        delay_seconds: What a step of any worker takes at least.
        slow_factor: How many times longer the slow worker's takes.
        measure_every_seconds: Pause between two looks at the held-out rows.
    """

    num_workers: int = 4
    num_sets: int = 936
    batch_size: int = 64
    delay_seconds: float = 0.05
    slow_factor: float = 10.0
    measure_every_seconds: float = 0.5


class HeldOut(keras.callbacks.Callback):
    """Measures the log-loss of held-out rows at intervals, on the chief, while the clock stands still.

    The clock starts when the first step has been applied: tracing is over then. Callbacks run between two updates, so
    that all variables are of one version. Workers go on meanwhile: each may finish the set it is at, so that a look
    saves a policy at most the rest of one set a worker.

    Attributes:
        curve: A `(seconds, steps, log_loss)` for each look.
        statistics: Of the strategy, at the last look; None on one device.
    """

    def __init__(self, data: clicks.Clicks, num_steps: int, every_seconds: float):
        super().__init__()
        self._num_steps, self._every_seconds = num_steps, every_seconds
        self._features, clicked = next(iter(data.test(NUM_TEST_ROWS, NUM_TEST_ROWS)))
        self._clicked = clicked.numpy()[:, 0]
        # A copy on the chief: evaluation would otherwise wait for the workers, the slow one among them.
        self._copy = make_model(data.num_users, data.num_items)
        self._predict = tf.function(self._copy)
        self._started = None
        self._paused_seconds = 0.0
        self.curve: list[tuple[float, int, float]] = []
        self.statistics = None

    def on_train_batch_end(self, batch, logs=None):
        """See `keras.callbacks.Callback`."""
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        seconds = now - self._started - self._paused_seconds
        is_due = not self.curve or seconds >= self.curve[-1][0] + self._every_seconds
        if is_due or batch + 1 == self._num_steps:
            self.curve.append((seconds, batch + 1, self._log_loss()))
            self.statistics = getattr(self.model.distribute_strategy, "statistics", None)
            self._paused_seconds += time.perf_counter() - now

    def _log_loss(self) -> float:
        self._copy.set_weights(self.model.get_weights())
        return quality.log_loss(self._predict(self._features).numpy()[:, 0], self._clicked)


def train(policy: str, job: Job) -> dict:
    """Trains under one policy.

    Args:
        policy: A name in `POLICIES`.
        job: What is trained.

    Returns:
        Plain data: `policy`, `curve` and `statistics`.
    """
    arguments, strategy = POLICIES[policy], tf.distribute.get_strategy()
    sets_per_step = 1
    if arguments is not None:
        # tfdist_ext: a cluster inside this process. A worker that sleeps holds a thread.
        cluster = tfdist_ext.cluster.in_process(job.num_workers, num_ps=1, worker_threads=4 * job.num_workers)
        strategy = tfdist_ext.ParameterServerStrategy(cluster, **arguments)
        if isinstance(strategy.update_policy, tfdist_ext.Synchronous):
            sets_per_step = job.num_workers - strategy.update_policy.num_backup_workers
        for worker in range(job.num_workers):
            factor = job.slow_factor if worker == job.num_workers - 1 else 1.0
            slow_worker.set_delay(slow_worker.worker_device(worker), factor * job.delay_seconds)
    data = clicks.Clicks()
    num_steps = job.num_sets // sets_per_step
    held_out = HeldOut(data, num_steps, job.measure_every_seconds)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model_class = keras.Model if arguments is None else slow_worker.SlowedModel
        model = make_model(data.num_users, data.num_items, model_class)
    # Far more rows than are used, so that no worker comes to the end of its shard.
    rows = data.train(1000 * job.num_sets * job.batch_size, job.batch_size)
    model.fit(rows, steps_per_epoch=num_steps, shuffle=False, verbose=0, callbacks=[held_out])
    return {"policy": policy, "curve": held_out.curve, "statistics": held_out.statistics}
