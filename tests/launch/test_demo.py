"""`tfdist-ext demo`: what is judged, with made-up runs; and once the real thing."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from tfdist_ext.launch import command, demo, demo_report

GOOD = {"steps": 540, "median_step_seconds": 0.004, "final_loss": 0.01, "test_accuracy": 0.98}
WEIGHTS = {"float64/0": np.array([[1.0, 2.0]]), "float64/1": np.zeros(1), "float32/0": np.ones(2, np.float32)}


@pytest.fixture
def trained(monkeypatch):
    """Stands in for the training: `trained[n]` is (numbers, weights, exit code) of the run with n processes."""
    runs = {1: (GOOD, WEIGHTS, 0), 2: (GOOD, WEIGHTS, 0)}

    def train(files, *, epochs, num_workers):
        numbers, weights, code = runs[num_workers]
        files.with_suffix(".json").write_text(json.dumps(numbers))
        np.savez(files.with_suffix(".npz"), allow_pickle=False, **weights)
        return code

    monkeypatch.setattr(demo, "train", train)
    return runs


def run(out, *flags):
    return command.main(["demo", "--out", str(out), *flags])


def test_equal_runs_end_with_0_and_a_report(trained, tmp_path, capsys):
    out = tmp_path / "not" / "there"
    assert run(out) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["equivalence"] == {
        "equal": True,
        "max_abs_weight_difference": 0.0,
        "tolerance": 1e-12,
        "float32_max_abs_weight_difference": 0.0,
    }
    assert report["runs"] == [
        {"name": "one device", "workers": 1, **GOOD},
        {"name": "2 workers", "workers": 2, **GOOD},
    ]
    assert report["machine"]["cpus"] >= 1 and "node" not in report["machine"]
    output = capsys.readouterr().out
    assert "Verdict: equal" in output and "one device      540              4.00" in output


@pytest.mark.parametrize(
    ("name", "difference", "expected"), [("float64/0", 2e-12, 2e-12), ("float64/1", math.nan, None)]
)
def test_a_difference_ends_with_1(trained, tmp_path, capsys, name, difference, expected):
    trained[2] = (GOOD, {**WEIGHTS, name: WEIGHTS[name] + difference}, 0)
    assert run(tmp_path) == 1
    equivalence = json.loads((tmp_path / "report.json").read_text())["equivalence"]
    assert not equivalence["equal"]
    # 2.0 + 2e-12 is rounded to a multiple of 2**-51.
    assert equivalence["max_abs_weight_difference"] == pytest.approx(expected, abs=2**-51)
    shown = capsys.readouterr()
    assert "Verdict: NOT equal" in shown.out and "The two runs are not equal." in shown.err


def test_the_float32_difference_is_shown_and_not_judged(trained, tmp_path):
    trained[2] = (GOOD, {**WEIGHTS, "float32/0": np.array([1.0, 1.5], np.float32)}, 0)
    assert run(tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["equivalence"]["float32_max_abs_weight_difference"] == 0.5


@pytest.mark.parametrize("accuracy", [0.97, math.nan])
def test_a_poor_model_ends_with_1(trained, tmp_path, capsys, accuracy):
    trained[2] = ({**GOOD, "test_accuracy": accuracy}, WEIGHTS, 0)
    assert run(tmp_path) == 1
    assert "accuracy of the run on 2 workers is" in capsys.readouterr().err


def test_a_failed_training_gives_its_exit_code_and_no_report(trained, tmp_path, capsys):
    (tmp_path / "report.json").write_text("of an earlier run")
    trained[2] = (GOOD, WEIGHTS, 7)
    assert run(tmp_path) == 7
    assert "the training on 2 workers failed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_weights_of_another_shape_or_number_are_not_equal():
    fewer = {name: array for name, array in WEIGHTS.items() if name != "float64/1"}
    other = {**WEIGHTS, "float64/0": np.ones((2, 1))}
    for weights in (fewer, other, {}):
        assert demo_report.compare(WEIGHTS, weights)["max_abs_weight_difference"] is None
        assert not demo_report.compare(WEIGHTS, weights)["equal"]
    assert not demo_report.compare({}, {})["equal"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "must be at least 1; received 0"),
        (["--workers", "1"], "must be at least 2; received 1"),
        (["--out", "/dev/null/x"], "cannot write to --out /dev/null/x: Not a directory"),
    ],
)
def test_a_mistake_is_one_message(flags, message, capsys):
    with pytest.raises(SystemExit) as exited:
        command.main(["demo", *flags])
    assert exited.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1] and sum("error" in line for line in lines) == 1


def test_the_real_demo(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tfdist_ext.launch.command", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["equivalence"]["equal"]
    # The runs really took another way: in float32 rounding must have shown.
    assert report["equivalence"]["float32_max_abs_weight_difference"] > 0
    assert [run["steps"] for run in report["runs"]] == [12 * 45] * 2
    assert all(run["test_accuracy"] > 0.97 for run in report["runs"])
    # Progress of both runs, and none of the noise of TensorFlow's libraries.
    assert "[one device] Epoch 12/12" in done.stdout and "[worker:0] Epoch 12/12" in done.stdout
    assert "absl::InitializeLog" not in done.stderr
