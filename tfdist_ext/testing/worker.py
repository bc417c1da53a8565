"""What does a worker process do? It runs one function after another."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import os
import queue
import random
import signal
import socket
import sys
import threading
from typing import Any

import numpy as np

from tfdist_ext.cluster import environment
from tfdist_ext.testing import messages
from tfdist_ext.testing.outcomes import Failure

_ORPHAN_SECONDS = 10.0


def import_tensorflow() -> None:
    """Imports what takes seconds; nothing of it starts a thread."""
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401


def serve(descriptor: int, num_devices: int) -> None:
    """Runs jobs until the other end of the socket is closed.

    Args:
        descriptor: Number of the file descriptor of the socket.
        num_devices: How many logical CPU devices TensorFlow gets.
    """
    # The stacks go where the output goes, also when the interpreter is stuck.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(stream, jobs), daemon=True).start()
    _make_devices(num_devices)
    messages.write_message(stream, {"ready": True})
    while (job := jobs.get()) is not None:
        _answer(stream, job)
        if job["reset"]:
            reset()


def forget_seeds() -> None:
    """Makes random numbers as unforeseeable as in a new process."""
    import tensorflow as tf

    tf.random.set_seed(None)
    np.random.seed(None)
    random.seed(None)


def reset() -> None:
    """Forgets what a job may have left: Keras' session, names, precision, and every seed."""
    import keras
    import tensorflow as tf

    keras.config.set_floatx("float32")
    # Forgets the dtype policy too; setting one here would make later jobs deaf to their floatx.
    keras.backend.clear_session()
    tf.config.run_functions_eagerly(False)
    forget_seeds()
    # A strategy holds sockets and threads until it is collected.
    gc.collect()


def _make_devices(num_devices: int) -> None:
    import tensorflow as tf

    devices = [tf.config.LogicalDeviceConfiguration()] * num_devices
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)


def _receive(stream: messages.Reader, jobs: queue.SimpleQueue) -> None:
    """Passes jobs on; when the other end is gone, ends the process even in the middle of a job."""
    try:
        while True:
            jobs.put(messages.read_message(stream))
    except (EOFError, OSError):
        jobs.put(None)
    threading.Event().wait(_ORPHAN_SECONDS)
    os._exit(1)


def _answer(stream: messages.Writer, job: dict[str, Any]) -> None:
    try:
        environment.set_variable(environment.TF_CONFIG, job["tf_config"])
        answer = {"result": _load(job["function"])(**job["arguments"])}
        messages.encode(answer["result"], name="the result")
    except BaseException as error:
        answer = {"failure": dataclasses.asdict(Failure.of(error))}
    # Where the other end was closed, nobody waits for the answer.
    with contextlib.suppress(BrokenPipeError):
        messages.write_message(stream, answer)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
