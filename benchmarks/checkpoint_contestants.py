"""What do the contestants of `benchmarks.checkpoint` do in their turn?

All save the same variables and are timed by the same code; each is checked before it is timed.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import time
import zlib
from collections.abc import Callable

import tensorflow as tf

from tfdist_ext.checkpoint import EverySteps, LatestN, TrainingCheckpointManager, TrainingState

# A snapshot that shares memory with the variables is paid for by the steps that overwrite them.
STEPS_THAT_PAY = 5
VARIABLE_MEGABYTES = 32.0
LEARNING_RATE, MOMENTUM = 1e-3, 0.9


def best_variable_megabytes(megabytes: float) -> float:
    """Returns the size of a variable: 32 MB, or less if there would be fewer than 8 of them."""
    return min(VARIABLE_MEGABYTES, megabytes / 8)


def seconds_of(action: Callable[[], object]) -> float:
    """Returns how long an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def warm_memory(folder: str, num_bytes: float) -> None:
    """Has the system own so much free memory, in pieces of all sizes.

    A virtual machine may give free memory back to its host within seconds (free page reporting, of pieces of 2 MB and
    more), and getting it again can take ten times as long as using it. Who is timed first after a pause would pay for
    all; and a write of many megabytes takes large pieces, one of a megabyte does not.

    Args:
        folder: Where to put a file for a moment; it is gone before it goes to the disk.
        num_bytes: How much.
    """
    path = os.path.join(folder, "warm")
    piece = bytes(32 * 2**20)
    with open(path, "wb", buffering=0) as file:
        for _ in range(int(num_bytes / len(piece)) + 1):
            file.write(piece)
    os.unlink(path)


class Training(tf.Module):
    """Weights and as many velocities, and SGD with momentum on half the sum of the squares of the weights.

    The variables are TensorFlow's and not Keras': TensorFlow's asynchronous checkpoint of Keras 3 variables fails at
    the second save ("tf.function only supports singleton tf.Variables created on the first call").

    Args:
        megabytes: Of all variables.
        variable_megabytes: Of each.
    """

    def __init__(self, megabytes: float, variable_megabytes: float):
        super().__init__()
        num_elements = int(variable_megabytes * 2**20 / 4)
        num_weights = max(1, round(megabytes / variable_megabytes / 2))
        self.weights = [
            tf.Variable(tf.random.stateless_normal([num_elements], [number, 0]))
            for number in range(num_weights)
        ]
        self.velocities = [tf.Variable(tf.zeros([num_elements])) for _ in self.weights]

    @property
    def num_bytes(self) -> int:
        """Bytes of all variables."""
        return sum(4 * variable.shape.num_elements() for variable in self.variables)

    @tf.function(jit_compile=False)
    def step(self):
        """Trains a step, in the operations that Keras' SGD uses."""
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.nn.l2_loss(weight) for weight in self.weights])
        gradients = tape.gradient(loss, self.weights)
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients, strict=True):
            velocity.assign(MOMENTUM * velocity - LEARNING_RATE * gradient)
            weight.assign_add(velocity)

    def steps(self, num_steps: int = STEPS_THAT_PAY) -> None:
        """Trains so many steps."""
        for _ in range(num_steps):
            self.step()

    def checksums(self) -> list[int]:
        """Returns a checksum of each variable."""
        return [zlib.crc32(variable.numpy().data) for variable in self.variables]

    def forget(self) -> None:
        """Sets all variables to zero."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))

    def check(self, contestant: Contestant) -> None:
        """Lets a contestant save while steps go on, and restore.

        Raises:
            RuntimeError: What comes back is not what the variables were when it was saved.
        """
        self.steps(1)
        saved = self.checksums()
        contestant.save()
        self.steps(2)
        contestant.finish()
        self.forget()
        contestant.restore()
        if self.checksums() != saved:
            raise RuntimeError(f"{type(contestant).__name__} did not restore what it saved.")
        contestant.clear()


class Contestant:
    """One way to save and restore.

    Args:
        training: What.
        folder: An existing folder.
    """

    def __init__(self, training: Training, folder: str):
        self.training = training
        self.folder = os.path.join(folder, type(self).__name__)
        self.num_saves = 0
        os.mkdir(self.folder)

    def save(self) -> None:
        """Does what training waits for."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Returns True when all of it is done."""
        return True

    def finish(self) -> None:
        """Waits for the rest."""

    def restore(self) -> None:
        """Restores the last save."""
        raise NotImplementedError

    def clear(self) -> None:
        """Removes what was written; the next contestant's fsync is not to wait for that."""
        for path in pathlib.Path(self.folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()

    def turn(self) -> dict[str, float]:
        """Times a save during training, and a restore; leaves no files.

        Returns:
            Seconds, by what was measured.
        """
        training = self.training
        training.steps(1)
        steps = seconds_of(training.steps)
        # For a copy of the variables, for the file in the page cache, and for what steps need.
        warm_memory(self.folder, 3 * training.num_bytes)
        started = time.perf_counter()
        self.save()
        training.steps()
        blocking = time.perf_counter() - started - steps
        num_steps = STEPS_THAT_PAY
        while not self.is_finished():
            training.steps(1)
            num_steps += 1
        self.finish()
        written = time.perf_counter() - started
        until_written = written - num_steps * steps / STEPS_THAT_PAY
        warm_memory(self.folder, 2 * training.num_bytes)
        restore = seconds_of(self.restore)
        self.clear()
        return {
            "steps": steps,
            "blocking": blocking,
            "until written": until_written,
            "written after": written,
            "restore": restore,
        }


class Ours(Contestant):
    """`TrainingCheckpointManager`."""

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        state = TrainingState(training=training, allow_missing=["input"])
        self._manager = TrainingCheckpointManager(
            state, self.folder, save=EverySteps(2**31), keep=LatestN(1), stop_on_sigterm=False
        )
        self._manager.restore_or_initialize()

    def save(self) -> None:
        """See `Contestant`."""
        self.num_saves += 1
        self._manager.save(self.num_saves)

    def is_finished(self) -> bool:
        """See `Contestant`."""
        return self._manager.statistics["num_saves"] == self.num_saves

    def finish(self) -> None:
        """See `Contestant`."""
        self._manager.wait()

    def restore(self) -> None:
        """See `Contestant`."""
        self._manager.restore_or_initialize()

    def seconds_until_durable(self) -> float:
        """Returns the seconds of a save until its commit, without training beside it; leaves no files."""
        self.num_saves += 1
        warm_memory(self.folder, 2 * self.training.num_bytes)
        seconds = seconds_of(lambda: self._manager.save(self.num_saves, wait=True))
        self.clear()
        return seconds


class Synchronous(Contestant):
    """`tf.train.Checkpoint.write`."""

    options: tf.train.CheckpointOptions | None = None

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self._checkpoint = tf.train.Checkpoint(training=training)

    def save(self) -> None:
        """See `Contestant`."""
        self.num_saves += 1
        self._checkpoint.write(self._prefix, options=self.options)

    def restore(self) -> None:
        """See `Contestant`."""
        self._checkpoint.read(self._prefix)

    @property
    def _prefix(self) -> str:
        return os.path.join(self.folder, f"checkpoint-{self.num_saves}")


class StockAsynchronous(Synchronous):
    """`tf.train.Checkpoint.write`, asynchronous."""

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self._num_written = 0
        self.options = tf.train.CheckpointOptions(
            enable_async=True, experimental_write_callbacks=[self._note_written]
        )

    def _note_written(self) -> None:
        self._num_written += 1

    def is_finished(self) -> bool:
        """See `Contestant`."""
        return self._num_written == self.num_saves

    def finish(self) -> None:
        """See `Contestant`."""
        self._checkpoint.sync()


class PlainWrite:
    """One file with the bytes of all variables, durable, written a megabyte at a time: the least that a save takes.

    Args:
        training: Whose variables.
        folder: An existing folder.
    """

    def __init__(self, training: Training, folder: str):
        self._training = training
        self._folder = folder
        self._path = os.path.join(folder, "plain")

    def seconds(self) -> float:
        """Returns how long it takes."""
        values = [memoryview(variable.numpy()).cast("B") for variable in self._training.variables]
        warm_memory(self._folder, 2 * self._training.num_bytes)
        seconds = seconds_of(lambda: self._write(values))
        os.unlink(self._path)
        os.sync()
        return seconds

    def _write(self, values) -> None:
        with open(self._path, "wb", buffering=0) as file:
            for value in values:
                for begin in range(0, len(value), 2**20):
                    file.write(value[begin : begin + 2**20])
            os.fsync(file.fileno())
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
