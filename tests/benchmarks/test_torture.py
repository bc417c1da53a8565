"""Six kills, three of each kind of job: nothing is lost. And what would be lost is seen."""

import pytest

from benchmarks import torture
from benchmarks.torture_train import NUM_ROWS


@pytest.mark.sweep
def test_six_kills(tmp_path):
    for result in torture.run(num_kills=6, seed=20, folder=tmp_path):
        assert result["problems"] == []
        assert result["num_kills"] == 3 and result["num_kills_inside_save"] == 2
        assert result["rows_exactly_once_an_epoch"]
        assert result["weights_equal_bit_for_bit"] is (True if result["case"] == "workers" else None)


def test_what_is_wrong_is_said():
    good = {"exit_code": 0, "wrong_epochs": [], "counts": [2.0] * NUM_ROWS, "weights": {"w": "00"}}
    assert torture.verdict(good, 2, good) == []
    lost = {**good, "counts": [2.0] * (NUM_ROWS - 1) + [1.0]}
    assert "rows were not trained on 2 times each" in torture.verdict(lost, 2, None)[0]
    evened_out = {**good, "wrong_epochs": ["0 [0.0, 2.0]"]}
    assert "once in an epoch: 0 [0.0, 2.0]" in torture.verdict(evened_out, 2, None)[0]
    other = {**good, "weights": {"w": "01"}}
    assert torture.verdict(other, 2, good) == ["the weights are not those of the run without kills"]
    assert torture.verdict({**good, "exit_code": 137}, 2, None) == ["the job ended with exit code 137"]
