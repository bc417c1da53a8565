"""A cluster of real processes for the tests of this folder: a chief that runs functions, and tasks that serve."""

from __future__ import annotations

import os
import queue
import signal

from tfdist_ext.cluster import ClusterSpecification, Task, to_tf_config
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.testing.worker_process import WorkerProcess

DEADLINE_SECONDS = 60.0


def serve(timeout_seconds=600.0):
    """What a ps or a worker runs: the strategy serves, and its exit code is that of the process."""
    import tfdist_ext

    try:
        tfdist_ext.ParameterServerStrategy(startup_timeout_seconds=timeout_seconds)
    except SystemExit as end:
        os._exit(end.code)


class Cluster:
    """One chief, workers and ps on free ports of this machine; what runs at the end of the `with` is killed.

    Attributes:
        jobs: Addresses by job.
        processes: The process that runs, or ran last, as each task.
    """

    def __init__(self, *, num_workers=2, num_ps=1, spare=True):
        counts = {"chief": 1, "worker": num_workers, "ps": num_ps}
        reserved = ReservedPorts(sum(counts.values()))
        ports = iter(reserved.ports)
        self.jobs = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
        reserved.release()
        self._all = []
        self._answers = queue.SimpleQueue()
        tasks = [Task(job, index) for job, count in counts.items() for index in range(count)]
        self.processes = {task: self._process() for task in tasks}
        self.chief = self.processes[Task("chief", 0)]
        # Imports TensorFlow while the others train: a killed worker comes back at once.
        self._spare = self._process() if spare else None
        for task in tasks:
            if task.type != "chief":
                self._serve(task)

    def _process(self):
        process = WorkerProcess()
        self._all.append(process)
        return process

    def _serve(self, task):
        self._begin(
            self.processes[task], task, "tests.parameter_server.cluster:serve", {}, queue.SimpleQueue()
        )

    def _begin(self, process, task, function, arguments, inbox):
        process.wait_until_ready()
        job = {
            "function": function,
            "arguments": arguments,
            "tf_config": to_tf_config(ClusterSpecification.from_jobs(self.jobs, task=task)),
            "reset": False,
        }
        process.request(job, inbox, 0)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for process in self._all:
            process.send_signal(signal.SIGCONT)
            process.kill()

    def begin(self, function, **arguments):
        """Starts a function of `tests.parameter_server.programs` on the chief, which knows everybody's pid."""
        pids = {str(task): process.pid for task, process in self.processes.items()}
        path = f"tests.parameter_server.programs:{function}"
        self.chief.lines.clear()
        self._begin(self.chief, Task("chief", 0), path, {**arguments, "pids": pids}, self._answers)

    def result(self, timeout_seconds=DEADLINE_SECONDS):
        """Waits for the end of the function on the chief; returns what it returned."""
        try:
            _, answer = self._answers.get(timeout=timeout_seconds)
        except queue.Empty:
            stacks = self.chief.stacks()
            raise AssertionError(f"no answer in {timeout_seconds} s:\n{stacks}\n{self.output()}") from None
        assert answer is not None and "result" in answer, f"{answer}\n{self.output()}"
        return answer["result"]

    def run(self, function, timeout_seconds=DEADLINE_SECONDS, **arguments):
        """`begin` and `result`."""
        self.begin(function, **arguments)
        return self.result(timeout_seconds)

    def wait_for(self, text):
        """Waits for a line that the chief writes; returns it."""
        return self.chief.wait_for(text, DEADLINE_SECONDS)

    def chief_lines(self):
        """Returns what the chief has written since its present function began."""
        return list(self.chief.lines)

    def output(self):
        """Returns the last lines of the chief."""
        return "\n".join(self.chief.last_lines(60))

    def restart(self, job, index):
        """Starts a task again at its address, in a process that has imported TensorFlow already."""
        task = Task(job, index)
        self.processes[task].exit_code(DEADLINE_SECONDS)
        self.processes[task], self._spare = self._spare, self._process()
        self._serve(task)

    def kill_chief(self):
        """Kills the chief as `kill -9` does."""
        self.chief.send_signal(signal.SIGKILL)

    def signal(self, job, index, signum):
        """Sends a signal to a task."""
        self.processes[Task(job, index)].send_signal(signum)

    def exit_code(self, job, index, timeout_seconds=30.0):
        """Waits for the end of a task; returns its exit code."""
        return self.processes[Task(job, index)].exit_code(timeout_seconds)

    def finish(self, timeout_seconds=15.0):
        """Lets the chief's process end by itself; returns its exit code, None if it does not end."""
        self.chief._shut_down()
        return self.chief.exit_code(timeout_seconds)
