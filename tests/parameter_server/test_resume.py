"""A job on parameter servers that is stopped or killed goes on from its checkpoint, in new processes."""

import pathlib
import signal
import subprocess
import sys
import threading

from tests.cluster.processes import environment_of_a_task
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.cluster import ClusterSpecification, ServingExit, Task, to_tf_config
from tfdist_ext.cluster.ports import ReservedPorts

SCRIPT = pathlib.Path(__file__).with_name("resume.py")
TASKS = [Task("chief", 0), Task("worker", 0), Task("ps", 0)]
DEADLINE_SECONDS = 60


class Job:
    """One process for each task; what runs at the end of the `with` is killed."""

    def __init__(self, directory, step):
        reserved = ReservedPorts(len(TASKS))
        jobs = {}
        for task, port in zip(TASKS, reserved.ports, strict=True):
            jobs.setdefault(task.type, []).append(f"127.0.0.1:{port}")
        reserved.release()
        self.processes, self._logs = {}, directory
        for task in TASKS:
            tf_config = to_tf_config(ClusterSpecification.from_jobs(jobs, task=task))
            with open(directory / f"{task.type}-{task.index}.log", "ab") as log:
                self.processes[task] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(directory), str(step)],
                    env={**environment_of_a_task(), "TF_CONFIG": tf_config},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if task.type == "chief" else log,
                    stderr=log,
                    text=True,
                )
        self.chief = self.processes[TASKS[0]]
        self._alarm = threading.Timer(DEADLINE_SECONDS, self.chief.kill)
        self._alarm.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._alarm.cancel()
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.chief.stdout.close()

    def read(self, start):
        """Returns the rest of the next line of the chief that begins so."""
        for line in self.chief.stdout:
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"no line {start!r}:\n" + (self._logs / "chief-0.log").read_text()[-3000:])

    def exit_codes(self):
        return {str(task): process.wait(DEADLINE_SECONDS) for task, process in self.processes.items()}


def saved_steps(directory):
    records = CheckpointDirectory(directory / "checkpoints").records()
    return [record.step for record in records if record.problem is None]


def test_c6_sigterm_at_a_worker_makes_the_chief_save_and_everybody_end_with_143(tmp_path):
    with Job(tmp_path, step=25) as job:
        job.read("at the step")
        job.processes[Task("worker", 0)].send_signal(signal.SIGTERM)
        assert job.exit_codes() == {str(task): int(ServingExit.STOPPED) for task in TASKS}
    assert "worker:0 was asked to stop by SIGTERM" in (tmp_path / "worker-0.log").read_text()
    # Saved where it was, and not only at the last tenth step.
    assert saved_steps(tmp_path)[-1] >= 25


def test_c6_a_chief_killed_in_mid_epoch_starts_again_and_every_row_is_applied_once_an_epoch(tmp_path):
    """80 rows in 40 batches; killed in the second epoch, with a batch in flight."""
    with Job(tmp_path, step=55) as job:
        job.read("at the step")
        job.chief.kill()
    steps = saved_steps(tmp_path)
    assert steps and 40 <= steps[-1] <= 60
    with Job(tmp_path, step=0) as job:
        assert job.read("counts ") == "[2.0] iterations 80"
        assert job.exit_codes() == {str(task): 0 for task in TASKS}
