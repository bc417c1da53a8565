"""Is anything lost when tasks are killed at random moments?

    python -m benchmarks.torture --kills 30 --json results.json

Half of the kills are of a job of 2 synchronous workers, half of one on parameter servers (chief, 2 workers, 1 ps);
half of each come while a checkpoint is being saved. `kill -9` of a random task; `tfdist-ext run --max-restarts` starts
again. At the end each row must have been trained on once an epoch, and the synchronous weights must be, bit for bit,
those of a run without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.machine import write_results
from benchmarks.torture_train import NUM_ROWS

SHAPES = {
    "workers": (["--workers", "2"], ["worker-0", "worker-1"]),
    "ps": (["--chief", "--workers", "2", "--ps", "1"], ["chief-0", "worker-0", "worker-1", "ps-0"]),
}
# One save takes about this long; a kill inside it comes after a random part of it.
_SAVE_SECONDS = 0.06
_ANYWHERE_SECONDS = 0.5
_START_DEADLINE_SECONDS = 90.0


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill.

    Attributes:
        task: The task, such as "worker-1".
        inside_save: Whether it came right after a save had begun.
    """

    task: str
    inside_save: bool


class Job:
    """One job under the launcher.

    Args:
        shape: "workers" or "ps".
        folder: For everything that it writes.
        epochs: To train.
        max_restarts: For the launcher.
    """

    def __init__(self, shape: str, folder: pathlib.Path, epochs: int, max_restarts: int):
        flags, self.tasks = SHAPES[shape]
        self.folder = folder
        (folder / "pids").mkdir(parents=True)
        (folder / "marks").touch()
        launcher = [
            sys.executable, "-m", "tfdist_ext.launch.command", "run", *flags, "--max-restarts", str(max_restarts),
            "--restart-backoff-seconds", "0", "--worker-restarts", "1", "--grace-seconds", "1",
        ]  # fmt: skip
        script = [sys.executable, "-m", "benchmarks.torture_train", str(folder), str(epochs)]
        self._log = open(folder / "log", "wb")  # noqa: SIM115 - closed with the job
        self.process = subprocess.Popen(
            [*launcher, "--", *script], stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
        self.process.wait()
        self._log.close()

    @property
    def has_ended(self) -> bool:
        """True once the launcher has ended."""
        return self.process.poll() is not None

    def pid_of(self, task: str) -> int | None:
        """Returns the process that a task was last."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "pids" / task).read_text())
        return None

    def marks(self) -> int:
        """Returns how many marks there are."""
        return (self.folder / "marks").read_bytes().count(b"\n")

    def wait_for_mark(self, beginning: bytes, after: int) -> bool:
        """Waits for a new mark that begins so; False if the job ends before or nothing comes."""
        deadline = time.monotonic() + _START_DEADLINE_SECONDS
        while not self.has_ended and time.monotonic() < deadline:
            lines = (self.folder / "marks").read_bytes().splitlines()[after:]
            if any(line.startswith(beginning) for line in lines):
                return True
            time.sleep(0.001)
        return False


def torture(shape: str, folder: pathlib.Path, num_kills: int, epochs: int, seed: int) -> dict:
    """Runs one job and kills its tasks.

    Args:
        shape: "workers" or "ps".
        folder: An empty one.
        num_kills: Kills; fewer happen if the job ends before.
        epochs: To train.
        seed: Of everything that is random here.

    Returns:
        What was seen: `exit_code`, `kills`, `counts`, `weights`.
    """
    draw = random.Random(seed)
    kills: list[Kill] = []
    started = time.monotonic()
    with Job(shape, folder, epochs, max_restarts=num_kills + 2) as job:
        while len(kills) < num_kills:
            inside = len(kills) % 2 == 0
            seen = job.marks()
            # After a kill it trains again only when all are there again.
            if not job.wait_for_mark(b"checkpoint_begun" if inside else b"step", seen):
                break
            time.sleep(draw.uniform(0, _SAVE_SECONDS if inside else _ANYWHERE_SECONDS))
            task = draw.choice(job.tasks)
            pid = job.pid_of(task)
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    kills.append(Kill(task, inside))
        code = job.process.wait(600)
    result_path = folder / "result.json"
    result = (
        json.loads(result_path.read_text()) if result_path.exists() else {"counts": None, "weights": None}
    )
    wrong = folder / "wrong_epochs"
    wrong_epochs = wrong.read_text().splitlines() if wrong.exists() else []
    return {
        "exit_code": code,
        "wrong_epochs": wrong_epochs,
        "kills": kills,
        "seconds": time.monotonic() - started,
        **result,
    }


def verdict(seen: dict, epochs: int, undisturbed: dict | None) -> list[str]:
    """Returns what is wrong, as sentences; nothing if nothing is."""
    problems = []
    if seen["exit_code"] != 0:
        problems.append(f"the job ended with exit code {seen['exit_code']}")
    if seen["counts"] != [float(epochs)] * NUM_ROWS:
        problems.append(f"rows were not trained on {epochs} times each: {seen['counts']}")
    if seen["wrong_epochs"]:
        problems.append(f"rows were not trained on once in an epoch: {seen['wrong_epochs'][0]}")
    if undisturbed is not None and seen["weights"] != undisturbed["weights"]:
        problems.append("the weights are not those of the run without kills")
    return problems


def run(num_kills: int, seed: int, folder: pathlib.Path) -> list[dict]:
    """Tortures both jobs; returns a result for each."""
    results = []
    for shape in SHAPES:
        kills = num_kills // 2
        epochs = 6 + 3 * kills
        undisturbed = None
        if shape == "workers":
            undisturbed = torture(shape, folder / "undisturbed", 0, epochs, seed)
        seen = torture(shape, folder / shape, kills, epochs, seed)
        problems = verdict(seen, epochs, undisturbed)
        results.append(
            {
                "case": shape, "seed": seed, "epochs": epochs, "num_kills": len(seen["kills"]),
                "num_kills_inside_save": sum(kill.inside_save for kill in seen["kills"]),
                "killed": [kill.task for kill in seen["kills"]], "seconds": seen["seconds"], "problems": problems,
                "rows_exactly_once_an_epoch": not seen["wrong_epochs"]
                and seen["counts"] == [float(epochs)] * NUM_ROWS,
                "weights_equal_bit_for_bit": None if undisturbed is None else seen["weights"] == undisturbed["weights"],
            }
        )  # fmt: skip
        if problems:
            sys.stderr.write((folder / shape / "log").read_text(errors="replace")[-6000:])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints and writes; the exit code is 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        results = run(arguments.kills, seed, pathlib.Path(folder))
    for result in results:
        text = ", ".join(
            f"{name} {value}" for name, value in result.items() if name not in ("case", "killed")
        )
        sys.stdout.write(f"{result['case']}: {text}\n")
    if arguments.json:
        write_results(arguments.json, results)
    return 1 if any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
