"""The benchmark of `fit` runs, at toy size, and calculates what it says."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import fit


def test_the_results_by_hand():
    # Medians, so that one slow step does not count.
    seconds = {"ours": [0.010, 0.012, 9.0], "stock": [0.030, 0.036, 0.042], "plain": [0.008, 0.008, 0.2]}
    result = fit.two_workers_result(seconds, 8.0, 2)
    assert (result["ours_seconds"], result["stock_seconds"], result["one_device_seconds"]) == (
        0.012,
        0.036,
        0.008,
    )
    assert result["speedup_over_stock"] == pytest.approx(3.0) and result["case"] == "2_workers"
    seconds = {"plain": [0.010], "ours_mirrored": [0.0104], "stock_mirrored": [0.011]}
    result = fit.one_device_result(seconds, 0.5)
    assert result["overhead_fraction"] == pytest.approx(0.04)
    assert result["overhead_milliseconds"] == pytest.approx(0.4)


def test_trainings_that_differ_are_not_compared():
    kernel = np.ones((3, 2))
    fit.check_same_training({"plain": kernel, "ours": kernel + 1e-5})
    for wrong in (kernel + 0.01, kernel * np.nan):
        with pytest.raises(RuntimeError, match="ours trained another model"):
            fit.check_same_training({"plain": kernel, "ours": wrong})


def test_a_toy_run(tmp_path):
    path = tmp_path / "fit.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fit", "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert {"system", "processor", "cpus", "tensorflow"} <= set(document["machine"])
    workers, one_device = document["results"]
    assert {"ours_seconds", "stock_seconds", "one_device_seconds", "speedup_over_stock"} <= set(workers)
    assert {"plain_seconds", "ours_seconds", "mirrored_stock_seconds", "overhead_fraction"} <= set(one_device)
    assert [result["case"] for result in document["results"]] == ["2_workers", "one_device"]
    assert all(result["model_megabytes"] == 0.05 and result["steps"] > 0 for result in document["results"])


@pytest.mark.parametrize("megabytes", [0.05, 0.5, 8.0, 34.0])
def test_the_models_have_the_size_they_are_named_after(megabytes):
    from benchmarks import fit_programs as programs

    width = programs.width_of(megabytes)
    parameters = (programs.NUM_INPUTS + 1) * width + (width + 1) * width + (width + 1) * programs.NUM_CLASSES
    assert 4 * parameters / 1e6 == pytest.approx(megabytes, rel=0.01)
