"""What may a chief ask of a task that serves?

A remote procedure call in TensorFlow's own connection: the chief runs the op `PyFunc` on a device of the task,
with a token under which the task has registered one function. That function understands the fixed commands
below, each a short JSON text, and nothing else; no text is ever evaluated.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfdist_ext.cluster.specification import Task

TOKEN = "tfdist_ext_control"
GOODBYE = "goodbye"
PING = "ping"
ABOUT_STOP = "about stop"
_MAX_REASON = 300


@dataclasses.dataclass(frozen=True)
class Goodbye:
    """The last word of a chief.

    Attributes:
        failed: Whether its process ends because of an uncaught exception.
        reason: That exception, in one line; else empty.
        stopped: Whether it ends because some task was asked to stop by SIGTERM.
    """

    failed: bool = False
    reason: str = ""
    stopped: bool = False


def device_of(task: Task) -> str:
    """Names the device on which a task answers.

    Args:
        task: A ps or worker.

    Returns:
        Its first CPU.

    Example:
        >>> device_of(Task("worker", 1))
        '/job:worker/replica:0/task:1/device:CPU:0'
    """
    return f"/job:{task.type}/replica:0/task:{task.index}/device:CPU:0"


def goodbye_text(goodbye: Goodbye) -> str:
    """Writes a goodbye.

    Args:
        goodbye: What to say.

    Returns:
        A text for `call`.
    """
    fields = {"failed": goodbye.failed, "reason": one_line(goodbye.reason), "stopped": goodbye.stopped}
    return json.dumps({"command": GOODBYE, **fields})


def one_line(text: str) -> str:
    r"""Makes a text safe to show in one line.

    Args:
        text: Any text.

    Returns:
        At most 300 printable characters.

    Example:
        >>> one_line("two\n  lines")
        'two lines'
    """
    words = " ".join(text.split())
    return "".join(letter for letter in words if letter.isprintable())[:_MAX_REASON]


def call(task: Task, text: str) -> dict[str, Any]:
    """Gives a command to a task and waits for its answer, for as long as that takes.

    Runs on: chief, once it is connected; in any thread.

    Args:
        task: A ps or worker.
        text: The command.

    Returns:
        The answer.

    Raises:
        tf.errors.OpError: The task is gone, or does not serve by `serve_until_chief_ends`.
    """
    import tensorflow as tf

    from tfdist_ext import compat

    with compat.own_executor(), tf.device(device_of(task)):
        (answer,) = tf.raw_ops.PyFunc(input=[tf.constant(text)], token=TOKEN, Tout=[tf.string])
        return json.loads(answer.numpy())


def ping(task: Task) -> dict[str, Any]:
    """Asks a serving task who it is, for as long as that takes.

    Runs on: chief, once it is connected; in any thread.

    Args:
        task: A ps or worker.

    Returns:
        `task`, `host`, `pid` and `started` (seconds since 1970). A task that was started again has another
        `pid` or `started`.

    Raises:
        tf.errors.OpError: The task is gone, or does not serve by `serve_until_chief_ends`.
    """
    return call(task, json.dumps({"command": PING}))


def ask_about_stop(task: Task) -> dict[str, Any]:
    """Asks a serving task whether it was asked to stop, and has it note that from now on; see `stopping`.

    Runs on: chief, once it is connected; in any thread.

    Args:
        task: A ps or worker.

    Returns:
        What `ping` returns, and `asked_to_stop`.

    Raises:
        tf.errors.OpError: The task is gone, or does not serve by `serve_until_chief_ends`.
    """
    return call(task, json.dumps({"command": ABOUT_STOP}))


class Control:
    """The function that a serving task registers.

    Args:
        task: Who serves.
        on_command: Is called for every command, in a thread of TensorFlow; given the goodbye, if it is one.
        about_stop: Is called when the chief wants to know whether this task was asked to stop, and says so.
    """

    def __init__(
        self,
        task: Task,
        on_command: Callable[[Goodbye | None], None],
        about_stop: Callable[[], bool] = lambda: False,
    ):
        self._identity = {
            "task": str(task),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.time(),
        }
        self._on_command = on_command
        self._about_stop = about_stop

    def __call__(self, text: bytes) -> bytes:
        """Obeys one command.

        Args:
            text: JSON with `command`.

        Returns:
            JSON: who serves, or `error` where the command is none of the three.
        """
        try:
            command = json.loads(text)
        except (TypeError, ValueError):
            command = None
        name = command.get("command") if isinstance(command, Mapping) else None
        if name not in (GOODBYE, PING, ABOUT_STOP):
            return json.dumps({"error": "unknown command"}).encode()
        goodbye = None
        if name == GOODBYE:
            reason = one_line(str(command.get("reason", "")))
            goodbye = Goodbye(bool(command.get("failed")), reason, bool(command.get("stopped")))
        self._on_command(goodbye)
        more = {"asked_to_stop": self._about_stop()} if name == ABOUT_STOP else {}
        return json.dumps({**self._identity, **more}).encode()
