"""`tfdist-ext run`: how do I start my script on a local cluster?"""

from __future__ import annotations

import argparse
import functools
import pathlib
import secrets
import shutil
from collections.abc import Sequence

from tfdist_ext.cluster import Task
from tfdist_ext.cluster import environment as environment_lib
from tfdist_ext.cluster.ports import ReservedPorts
from tfdist_ext.launch.decisions import Rules
from tfdist_ext.launch.machine import num_cpus
from tfdist_ext.launch.output import say
from tfdist_ext.launch.plan import HOST, JobShape, plan_environments, tasks_with_address
from tfdist_ext.launch.restarts import RestartRules
from tfdist_ext.launch.supervisor import Supervisor

_EPILOG = """\
Every task runs the same command with a TF_CONFIG of its own. Lines of output get the task's name before them.
When a task fails all others are stopped, the first failure is named last, and its exit code is the job's. A
worker of a job with ps is restarted alone instead. Ctrl-C and SIGTERM are passed on to all tasks; a second
one kills. Thread counts that you set yourself (TF_NUM_INTRAOP_THREADS and the like) stay, unless --threads is
given. Tasks share a secret that is drawn for this job, so that no other user of this machine can join it, unless
TFDIST_EXT_CLUSTER_SECRET is set; it does not reach what TensorFlow itself sends to and from ps.

With --max-restarts R, a group that failed is started again as a whole, on new ports and at most R times in
total, unless the exit code was 2, 126 or 127, or a signal came to the launcher. The script resumes from its own
last checkpoint; TFDIST_RESTART_COUNT tells it how often the group was started before. The end names every
failure, and the exit code is that of the last attempt. A task that gets a SIGTERM of its own and then ends with
143 was preempted, which is a failure like any other.

  tfdist-ext run --workers 2 -- python train.py --epochs 3
  tfdist-ext run --workers 2 --max-restarts 5 -- python train.py
  tfdist-ext run --chief --workers 2 --ps 1 --log-dir logs -- python train.py
"""


def main(argv: Sequence[str]) -> int:
    """Runs the subcommand.

    Args:
        argv: Its flags, `--`, and the command that every task runs.

    Returns:
        The exit code of the job.
    """
    parser = _parser()
    own, command = _split(list(argv))
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        hint = (
            ""
            if "--" in argv
            else " Write the command after `--`: tfdist-ext run --workers 2 -- python train.py"
        )
        parser.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
    try:
        shape = JobShape(
            num_workers=arguments.workers,
            chief=arguments.chief,
            num_ps=arguments.ps,
            evaluator=arguments.evaluator,
        )
        rules = Rules(grace_seconds=arguments.grace_seconds, worker_restarts=arguments.worker_restarts)
        restart_rules = RestartRules(
            max_restarts=arguments.max_restarts, backoff_seconds=arguments.restart_backoff_seconds
        )
        log_dir = _made(arguments.log_dir)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    complaint = _complaint_about(command)
    if complaint:
        parser.error(complaint)
    supervisor = Supervisor(
        command,
        functools.partial(_plan, shape, arguments.threads, secret_of_job()),
        rules=rules,
        restart_rules=restart_rules,
        log_dir=log_dir,
    )
    try:
        return supervisor.run()
    except OSError as error:
        say(f"cannot start {command[0]!r}: {error}")
        return 126


def secret_of_job() -> str:
    """Returns the cluster secret of a local job, without which any user of this host could join it.

    Returns:
        That of the environment, or a new one.
    """
    return environment_lib.cluster_secret() or secrets.token_hex(32)


def _plan(
    shape: JobShape, num_threads: int | None, secret: str, restart_count: int
) -> dict[Task, dict[str, str]]:
    """Gives an attempt new ports, says where it starts, and leaves the ports to it."""
    addressed = tasks_with_address(shape)
    reserved = ReservedPorts(len(addressed))
    environments = plan_environments(
        shape,
        reserved.ports,
        num_threads=num_threads or num_cpus(),
        inherited=environment_lib.inherited(),
        secret=secret,
        restart_count=restart_count,
        force=num_threads is not None,
    )
    places = ", ".join(
        f"{task} at {HOST}:{port}" for task, port in zip(addressed, reserved.ports, strict=True)
    )
    say(f"starting {places}{', and evaluator:0' if shape.evaluator else ''}")
    reserved.release()
    return environments


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Parts our flags from the command, so that flags of the script are never taken for ours."""
    if "--" not in argv:
        return argv, []
    position = argv.index("--")
    return argv[:position], argv[position + 1 :]


def _complaint_about(command: list[str]) -> str | None:
    if not command:
        return "no command to run. Write it after `--`: tfdist-ext run --workers 2 -- python train.py"
    if shutil.which(command[0]) is not None:
        return None
    if command[0].endswith(".py"):
        return f"{command[0]!r} is no program. Try: -- python {' '.join(command)}"
    return f"the program {command[0]!r} was not found. Is it installed, and on the PATH?"


def _made(log_dir: str | None) -> pathlib.Path | None:
    if log_dir is None:
        return None
    path = pathlib.Path(log_dir)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist-ext run",
        usage="tfdist-ext run [flags] -- COMMAND [ARGUMENTS]",
        description="Starts a command as every task of a cluster on this machine, and supervises it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workers", type=int, default=2, metavar="N", help="tasks of type worker (default 2)")
    add("--chief", action="store_true", help="add a chief, which trains (or, with ps, leads)")
    add("--ps", type=int, default=0, metavar="N", help="parameter server tasks (default 0)")
    add("--evaluator", action="store_true", help="add an evaluator, which runs alone outside the cluster")
    add(
        "--log-dir",
        metavar="DIR",
        help="also keep each task's output, in DIR/worker-0.log etc.; restarts append",
    )
    add(
        "--worker-restarts",
        type=int,
        default=3,
        metavar="R",
        help="restarts of each worker with ps (default 3)",
    )
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="restarts of the whole group in total, after a failure (default 0)",
    )
    add(
        "--restart-backoff-seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="wait before the first of them, doubled for each further one up to 60 (default 1)",
    )
    add("--grace-seconds", type=float, default=10.0, metavar="S", help="from asking to killing (default 10)")
    add(
        "--threads",
        type=_positive,
        metavar="N",
        help="CPU threads to divide among tasks (default: all there are)",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; received {number}")
    return number
