"""What the tests of this folder run in processes of their own."""

from __future__ import annotations


def train_in_process():
    """Makes a cluster in this process and trains a variable on its ps."""
    import tensorflow as tf

    from tfdist_ext.cluster import in_process, resolve, say_goodbye_at_exit
    from tfdist_ext.cluster.in_process import runs_in_this_process

    # The fewest threads that are allowed.
    resolver = in_process(2, 1, worker_threads=3)
    again = in_process(2, 1, ps_threads=3)
    try:
        in_process(3, 1)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    specification = resolve(resolver)
    say_goodbye_at_exit(specification)
    strategy = tf.distribute.experimental.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        total = tf.Variable(0.0)

    @tf.function
    def add(number):
        total.assign_add(number)

    for number in range(20):
        coordinator.schedule(add, (tf.constant(float(number)),))
    coordinator.join()
    return {
        "same": again is resolver,
        "refusal": refusal,
        "here": runs_in_this_process(specification),
        "task": str(specification.task),
        "jobs": {job: len(members) for job, members in specification.jobs.items()},
        "loopback": all(address.startswith("127.0.0.1:") for _, address in specification.members),
        "device": total.device,
        "total": float(total.read_value()),
    }
