"""Functions that run in worker processes."""

import json
import os
import random
import signal
import sys
import threading

import numpy as np

from tfdist_ext.errors import PeerLostError

NUM_CALLS = 0


def describe(scale, offset=0.0):
    """Says where it runs, and computes something from its arguments."""
    import tensorflow as tf

    global NUM_CALLS
    NUM_CALLS += 1
    return {
        "pid": os.getpid(),
        "tf_config": json.loads(os.environ["TF_CONFIG"]),
        "devices": len(tf.config.list_logical_devices("CPU")),
        "threads": [os.environ["TF_NUM_INTEROP_THREADS"], os.environ["TF_NUM_INTRAOP_THREADS"]],
        "num_calls": NUM_CALLS,
        "nested": {"values": [tf.constant(scale) * 2.0, (offset, None)], 7: np.arange(3, dtype=np.int16)},
    }


def leave_traces():
    """Changes what a careless test changes, and says what it found."""
    import keras
    import tensorflow as tf

    found = {"floatx": keras.config.floatx(), "eager": tf.config.functions_run_eagerly()}
    keras.config.set_floatx("float64")
    layer = keras.layers.Dense(1)
    found |= {
        "layer": [layer.name, layer.compute_dtype],
        "draws": [float(tf.random.uniform([])), float(np.random.random())],
    }
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(1)
    tf.config.run_functions_eagerly(True)
    return found


def fail_on(rank):
    """Raises a typed error on one worker."""
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == rank:
        raise PeerLostError(
            "worker:1 is gone", task="worker:1", collective="gradients/3", step=7, waited_seconds=2.5
        )
    return rank


def hang_on(rank, forever=60.0):
    """Waits for something that never comes, on one worker."""
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == rank:
        threading.Event().wait(forever)


def die_on(rank):
    """Ends one process without a word to anybody."""
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == rank:
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def return_unsendable():
    return {"a": [1, object()]}


def talk_until_told(path):
    """Says a line, waits for a file, and returns what is in it."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    sys.stdout.write(f"step 1 of worker {rank}\n")
    sys.stdout.flush()
    while not os.path.exists(path):
        threading.Event().wait(0.01)
    with open(path) as file:
        return file.read()


def all_reduce(values):
    """Sums an array over the workers of TF_CONFIG."""
    from tfdist_ext.cluster import resolve
    from tfdist_ext.collectives import ProcessGroup

    cluster = resolve()
    addresses = [address for _, address in cluster.members]
    names = [str(task) for task, _ in cluster.members]
    group = ProcessGroup.connect(addresses, cluster.rank, task_names=names)
    try:
        total = np.array(values, np.float64)
        return group.submit_all_reduce(total, name="values").result()
    finally:
        group.close()


def what_is_its_own():
    """Returns what differs between processes that were started one by one."""
    import tensorflow as tf

    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "random": random.random(),
        "numpy": float(np.random.random()),
        "tensorflow": float(tf.random.uniform([])),
        "hash": hash("a text"),
    }
