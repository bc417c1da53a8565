"""The script that every task of `tests.cluster.processes.Job` runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from tfdist_ext.cluster import (
    Task,
    ping,
    resolve,
    say_goodbye_at_exit,
    serve_until_chief_ends,
    wait_for_tasks,
)

# Ignored, as in what a shell starts in the background, it would stay so.
signal.signal(signal.SIGINT, signal.default_int_handler)
specification = resolve()


def connect(tasks):
    import tensorflow as tf

    jobs = {job: members for job, members in specification.jobs.items() if job != "evaluator"}
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs), job_name="chief", task_index=0)
    for task in tasks:
        with tf.device(f"/job:{task.type}/task:{task.index}"):
            print("sum", (tf.constant(2.0) + 3.0).numpy())


def chief():
    """Obeys the lines of standard input until there are no more."""
    tasks = [task for task, _ in specification.members if task.type in ("ps", "worker")]
    wait_for_tasks(specification, timeout_seconds=60)
    connect(tasks)
    say_goodbye_at_exit(specification)
    print("connected")
    for line in sys.stdin:
        command, *words = line.split()
        if command == "ping":
            print("answer", json.dumps(ping(Task(words[0], int(words[1])))))
        elif command == "reconnect":
            task = Task(words[0], int(words[1]))
            wait_for_tasks(specification, [task], timeout_seconds=60)
            connect([task])
        elif command == "raise":
            raise ValueError("a mistake\nof the script")
        elif command == "die":
            os.kill(os.getpid(), 9)
        else:
            break
    print("ends")


def serve_twice():
    """Serves, and asks for the same again meanwhile."""

    def again():
        try:
            serve_until_chief_ends(specification)
        except RuntimeError as error:
            print("refused", error)

    threading.Timer(0.1, again).start()
    return serve_until_chief_ends(specification, startup_timeout_seconds=5)


def main():
    arguments = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    if specification.task.type == "evaluator":
        print("evaluates alone")
    elif specification.task.type == "chief":
        chief()
    elif arguments.pop("twice", False):
        sys.exit(serve_twice())
    else:
        sys.exit(serve_until_chief_ends(specification, **arguments))


if __name__ == "__main__":
    main()
