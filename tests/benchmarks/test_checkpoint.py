"""The benchmark of checkpoints runs, at toy size, compares only what is right, and calculates what it says."""

import json
import subprocess
import sys

import pytest

from benchmarks import checkpoint, quiet


def test_the_result_by_hand():
    # Medians, so that one slow turn does not count.
    seconds = {
        "ours blocking": [0.02, 0.03, 9.0],
        "ours until written": [0.1, 0.11, 0.12],
        "ours written after": [0.5, 0.6, 0.7],
        "ours restore": [0.05, 0.06, 0.07],
        "ours total": [0.2, 0.22, 5.0],
        "plain write": [0.2, 0.2, 0.3],
        "synchronous blocking": [0.3, 0.2, 0.1],
        "synchronous until written": [0.3, 0.2, 0.1],
        "synchronous restore": [0.12, 0.12, 0.12],
        "synchronous steps": [0.25, 0.25, 0.25],
        "stock_async blocking": [0.1, 0.06, 0.01],
        "stock_async until written": [0.1, 0.1, 0.1],
    }
    result = checkpoint.result_of(256.0, seconds)
    assert (result["megabytes"], result["blocking_seconds"], result["rounds"]) == (256.0, 0.03, 3)
    assert result["blocking_ratio_to_synchronous"] == pytest.approx(0.03 / 0.2)
    assert result["blocking_ratio_to_stock_async"] == pytest.approx(0.5)
    assert result["total_ratio_to_plain_write"] == pytest.approx(1.1)
    assert result["restore_ratio_to_stock"] == pytest.approx(0.5)
    assert result["step_seconds"] == pytest.approx(0.05)


def test_a_machine_that_is_busy_makes_a_turn_repeat(monkeypatch):
    """Of 10 CPU seconds others take 5 in the first turn and half of one in the second: at most a tenth counts."""
    clock = iter([(0, 0), (10, 5), (20, 5), (30, 5.5), (40, 9)])
    monkeypatch.setattr(quiet, "_cpu_seconds", lambda: next(clock))
    machine = quiet.QuietMachine(patience_seconds=1.0)
    monkeypatch.setattr(machine, "_wait", lambda: None)
    turns = iter(["disturbed", "quiet"])
    assert machine.run(lambda: next(turns)) == "quiet"
    assert (machine.num_turns, machine.num_disturbed) == (2, 1)


def test_who_does_not_restore_what_was_saved_is_not_compared(tmp_path):
    from benchmarks import checkpoint_contestants as contestants

    training = contestants.Training(0.5, 0.0625)
    assert training.num_bytes == 0.5 * 2**20 and len(training.weights) == len(training.velocities) == 4

    class Forgetful(contestants.Synchronous):
        def restore(self):
            pass

    with pytest.raises(RuntimeError, match="Forgetful did not restore what it saved"):
        training.check(Forgetful(training, str(tmp_path)))
    training.check(contestants.Synchronous(training, str(tmp_path)))
    assert list((tmp_path / "Synchronous").iterdir()) == []


def test_a_toy_run(tmp_path):
    path = tmp_path / "checkpoint.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--megabytes", "2", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--patience-seconds", "0", "--directory", str(tmp_path), "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert {"system", "processor", "cpus", "tensorflow"} <= set(document["machine"])
    (result,) = document["results"]
    asked = {"megabytes", "blocking_seconds", "blocking_ratio_to_synchronous", "blocking_ratio_to_stock_async",
             "total_ratio_to_plain_write", "restore_ratio_to_stock"}  # fmt: skip
    assert asked <= set(result) and result["megabytes"] == 2.0 and result["rounds"] == 2
    # Three contestants, our save without training and the plain write; the first round does not count.
    assert result["turns"] == 3 * 5
    assert all(result[f"{name}_seconds"] > 0 for name in ("total", "plain_write", "restore", "step"))
    assert list(tmp_path.iterdir()) == [path]
    for field, _ in checkpoint.AIMS:
        assert f"  {field} " in done.stdout
