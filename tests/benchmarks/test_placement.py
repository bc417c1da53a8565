"""The benchmark of placement runs, at toy size, and calculates what it says."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import placement


def test_rank_correlation_by_hand():
    # Ranks 0 1 2 3 and 1 0 2 3: 1 - 6 x (1 + 1) / (4 x 15).
    assert placement.rank_correlation([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0]) == pytest.approx(0.8)
    assert placement.rank_correlation([1.0, 2.0], [5.0, 1.0]) == -1
    assert placement.rank_correlation([1.0, 1.0], [1.0, 2.0]) == 0


def test_it_runs_and_writes_the_fields(tmp_path):
    path = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.placement", "--quick", "--json", str(path)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(path.read_text())["results"]
    assert [result["case"] for result in results] == ["brute force"] * 3 + ["planning", "prediction"]
    for result in results[:3]:
        assert set(result["brute_force_ratio_geomean"]) == set(placement.METHODS)
        assert min(result["brute_force_ratio_geomean"].values()) >= 1 - 1e-12
    assert min(results[3]["plan_seconds"].values()) > 0
    prediction = results[4]
    assert (
        set(prediction["predicted_seconds"])
        == set(prediction["measured_seconds"])
        == set(placement.PLACEMENTS)
    )
    # One tensor of 64 x 64 floats costs 4 ms and 16384 / 50e6 s: whatever crosses is slower than what does not.
    measured = prediction["measured_seconds"]
    assert measured.pop("000") < min(measured.values())
