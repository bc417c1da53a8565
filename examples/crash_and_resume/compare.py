"""The job without kills and with them, and are the last bits equal? `python -m examples.crash_and_resume.compare`."""

import argparse
import subprocess
import sys
import tempfile

WORTH_SHOWING = ("start ", "killed after", "weights ", "each row", "accuracy")


def main():
    """Parses the flags, runs both jobs, and says whether they are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="processes of the job (%(default)s)")
    parser.add_argument("--kill-at-steps", default="30,75", metavar="K,K", help="see main.py (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("== not killed", flush=True)
        whole = results(arguments.workers, f"{folder}/whole")
        print(f"== killed after steps {arguments.kill_at_steps}", flush=True)
        killed = results(arguments.workers, f"{folder}/killed", arguments.kill_at_steps)
    # All workers of both jobs say the same.
    equal = len(whole) == len(killed) == arguments.workers and len({*whole, *killed}) == 1
    print("== the same bits" if equal else f"== NOT the same bits: {whole} and {killed}")
    return 0 if equal else 1


def results(num_workers, directory, kill_at_steps=None):
    """Runs the job under the launcher, and prints the lines that are worth it.

    Args:
        num_workers: Processes of the job.
        directory: For its checkpoints.
        kill_at_steps: See main.py.

    Returns:
        What each worker said of its weights, its optimizer and its rows.
    """
    kills = ["--kill-at-steps", kill_at_steps] if kill_at_steps else []
    launcher = ["tfdist_ext.launch.command", "run", "--workers", str(num_workers), "--max-restarts", "3"]
    program = [sys.executable, "-m", "examples.crash_and_resume.main", "--directory", directory, *kills]
    command = [sys.executable, "-m", *launcher, "--restart-backoff-seconds", "0.1", "--", *program]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        for line in job.stdout:
            lines.append(line.rstrip())
            if any(words in line for words in WORTH_SHOWING):
                print(lines[-1], flush=True)
    if job.returncode != 0:
        raise SystemExit("\n".join(["the job failed:", *lines[-30:]]))
    said = {}
    for line in lines:
        task, _, text = line.partition("] ")
        if text.startswith(("weights ", "each row ")):
            said[task] = said.get(task, "") + text + " "
    return list(said.values())


if __name__ == "__main__":
    sys.exit(main())
