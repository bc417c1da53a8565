"""The benchmark of parameter servers runs, at toy size, and calculates what it says."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import parameter_server


def test_aims_are_read_off_the_results():
    result = {"case": "async 8MB 200 variables", "ratio_to_stock": 1.4, "workers": 2, "ps": 1}
    assert parameter_server.aims_of(result) == [("ratio_to_stock 1.40, aim >= 1.5", False)]
    result = {"case": "sparse 40000 x 32", "ratio_to_touched_rows": 1.1, "ratio_to_small_table": 0.79}
    assert [reached for _, reached in parameter_server.aims_of(result)] == [True, False]
    # The aim is about Synchronous(1) alone.
    result = {"case": "one slow worker Synchronous(0)", "ratio_to_workers_that_are_not_slow": 0.1}
    assert parameter_server.aims_of(result) == []


def test_the_results_by_hand():
    from benchmarks import parameter_server_programs as programs

    # Medians, so that one slow turn does not count.
    rates = {"loop": [90.0, 100.0, 1.0], "stock": [125.0, 130.0, 120.0], "fit": [95.0, 80.0, 85.0]}
    loop, fit = programs.dense_results("0.5MB 6 variables", rates)
    assert (loop["updates_per_second"], loop["stock_updates_per_second"]) == (90.0, 125.0)
    assert loop["ratio_to_stock"] == pytest.approx(0.72) and loop["num_variables"] == 6
    assert fit["ratio_to_custom_loop"] == pytest.approx(85 / 90)
    result = programs.sparse_result(1000, 80.0, 10.0, 100.0, 500.0, 300_000.0)
    # 500 rows of 32 floats of 4 bytes, there and back.
    assert result["bytes_of_touched_rows"] == 128_000 and result["ratio_to_small_table"] == 0.8
    assert result["ratio_to_touched_rows"] == pytest.approx(300 / 128)


def test_models_and_ids_are_what_they_are_called():
    from benchmarks import parameter_server_models as models

    for name, (num_inputs, widths) in models.DENSE_MODELS.items():
        megabytes, _, num_variables = name.removesuffix(" variables").partition("MB ")
        assert models.megabytes_of(num_inputs, widths) == pytest.approx(float(megabytes), rel=0.01)
        assert 2 * len(widths) == int(num_variables)
    small, large = (models.draw_ids(rows, 10_000) for rows in (10_000, 1_000_000))
    assert small.shape[1] == 512 and large.max() > 900_000
    # As many different rows in each batch.
    assert [len(np.unique(batch)) for batch in small] == [len(np.unique(batch)) for batch in large]


def test_a_toy_run(tmp_path):
    path = tmp_path / "parameter_server.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.parameter_server", "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert {"system", "processor", "cpus", "tensorflow"} <= set(document["machine"])
    results = {result["case"]: result for result in document["results"]}
    kinds = [f"{kind} {name}" for name in ("Synchronous(0)", "Synchronous(1)", "BoundedStaleness(8)", "Asynchronous")
             for kind in ("no delay", "one slow worker")]  # fmt: skip
    dense = ["async 0.5MB 6 variables", "fit 0.5MB 6 variables"]
    assert list(results) == [*dense, "sparse 4000 x 32", "sparse 40000 x 32", *kinds]
    for result in results.values():
        assert (result["workers"], result["ps"]) == (2, 1) and result["updates_per_second"] > 0
    # TensorFlow's own loop has no policies, and no way to make one worker slow.
    with_stock = {case for case, result in results.items() if "stock_updates_per_second" in result}
    assert with_stock == {*dense, "sparse 4000 x 32", "sparse 40000 x 32", "no delay Asynchronous"}
    assert all(results[case]["ratio_to_stock"] > 0 for case in with_stock)
    assert results["fit 0.5MB 6 variables"]["ratio_to_custom_loop"] > 0
    # Bytes do not depend on how fast it goes.
    assert 1 <= results["sparse 40000 x 32"]["ratio_to_touched_rows"] < 2
    slow = results["one slow worker Synchronous(1)"]
    assert slow["ratio_to_no_delay"] > 0 and slow["ratio_to_workers_that_are_not_slow"] > 0
    for case in results:
        assert case in done.stdout
