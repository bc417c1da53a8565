"""`tfdist-ext inspect` says what is there, whether it is whole, and what is in it."""

import json
import math
import os
import subprocess
import sys
import time

import pytest

from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.manifest import Manifest, Piece, TensorRecord
from tfdist_ext.launch import inspect

TENSORS = (
    TensorRecord(name="dense/kernel", dtype="float32", shape=(300, 10)),
    TensorRecord(name="text", dtype="string"),
)
PIECES = (
    Piece(name="model", captured=True),
    Piece(name="input position", captured=False, reason="the dataset is a Python generator"),
)


def save(path, step, content=b"weights", **fields):
    directory = CheckpointDirectory(path)
    with directory.begin(step) as draft:
        draft.write_bytes("state", content)
        return draft.commit(
            Manifest(
                step=step,
                attempt=draft.attempt,
                files=tuple(draft.seal(["state"])),
                created_unix_seconds=time.time() - 7300,
                **fields,
            )
        )


@pytest.fixture
def path(tmp_path):
    """Three checkpoints, made two hours ago."""
    path = str(tmp_path / "checkpoints")
    save(path, 500, epoch=1, metrics={"loss": 0.25})
    save(path, 1000, epoch=2, batch=7, metrics={"loss": math.nan, "val_accuracy": 0.5})
    save(
        path,
        1500,
        content=bytes(12_000),
        epoch=3,
        tensors=TENSORS,
        pieces=PIECES,
        fingerprint={"tensorflow": "2.21.0", "strategy": "MirroredStrategy"},
        cluster={"workers": ["worker:0", "worker:1"]},
        input={"how": "skip", "batches": 12},
    )
    return path


def damage(path, step):
    (record,) = [record for record in CheckpointDirectory(path).records() if record.step == step]
    with open(os.path.join(record.path, "state"), "r+b") as file:
        file.write(b"X")


def test_the_list(path, capsys):
    assert inspect.main([path]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step  epoch/batch  age   size  state     metrics",
        " 500          1/0  2 h    7 B  complete  loss=0.25",
        "1000          2/7  2 h    7 B  complete  loss=nan, val_accuracy=0.5",
        "1500          3/0  2 h  12 kB  complete",
        "",
        "3 checkpoints, 12 kB. Step 1500 is the newest without a problem.",
        "complete: every file is there and has its size; `--verify` reads the tensors too and compares checksums.",
    ]


def test_a_damaged_checkpoint_is_told_and_fails_the_command(path, capsys):
    damage(path, 1500)
    save(path, 2000)
    manifest = os.path.join(CheckpointDirectory(path).newest_first()[0].path, "manifest.json")
    with open(manifest, "w") as file:
        file.write("{")
    assert inspect.main([path]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3:7] == [
        "1500          3/0  2 h  12 kB  PROBLEM",
        "  PROBLEM: state is damaged: its checksum is not the one that was written.",
        "2000            ?    ?      ?  PROBLEM",
        f"  PROBLEM: {manifest} is damaged: it is no JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1). Try an older checkpoint.",
    ]
    assert "Step 1000 is the newest without a problem." in lines[8]


def test_all_about_one_step(path, capsys):
    assert inspect.main([path, "--step", "1500"]) == 0
    folder = CheckpointDirectory(path).newest_first()[0].path
    assert capsys.readouterr().out.splitlines() == [
        "step  epoch/batch  age   size  state     metrics",
        "1500          3/0  2 h  12 kB  complete",
        "",
        f"Folder: {folder}",
        "Made by: tensorflow 2.21.0, strategy MirroredStrategy; workers worker:0 worker:1",
        "Input position: how skip, batches 12",
        "",
        "2 pieces:",
        "  model           captured",
        "  input position  NOT CAPTURED: the dataset is a Python generator",
        "",
        "2 tensors, 12 kB:",
        "  dense/kernel  float32 [300, 10]  12 kB",
        "  text          string []",
    ]


def test_only_the_step_that_was_asked_for_counts(path, capsys):
    damage(path, 500)
    assert inspect.main([path, "--step", "1000"]) == 0
    assert inspect.main([path, "--step", "500"]) == 1
    assert "PROBLEM: state is damaged" in capsys.readouterr().out


def test_json(path, capsys):
    damage(path, 500)
    assert inspect.main([path, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["directory"] == path
    first, second, third = report["checkpoints"]
    assert first["problem"].startswith("state is damaged") and second["problem"] is None
    assert (second["step"], second["epoch"], second["batch"], second["num_bytes"]) == (1000, 2, 7, 7)
    assert second["metrics"] == {"loss": "NaN", "val_accuracy": 0.5}
    assert 7300 <= second["age_seconds"] < 7400 and "tensors" not in third
    assert inspect.main([path, "--json", "--step", "1500"]) == 0
    (third,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [tensor["num_bytes"] for tensor in third["tensors"]] == [12_000, None]
    assert third["pieces"][1] == {
        "name": "input position",
        "captured": False,
        "reason": "the dataset is a Python generator",
    }
    assert third["input"] == {"how": "skip", "batches": 12} and third["verified"] is False


def test_a_wrong_directory_is_told_with_a_way_out(path, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    wrong = {
        str(tmp_path / "none"): "none does not exist. Is the path spelled right?",
        str(tmp_path / "file"): "file is a file, not a directory. Try the directory it is in.",
        str(tmp_path): f"holds no checkpoint. Try {path}.",
        CheckpointDirectory(path).newest_first()[0].path: f"Try the directory it is in, {path}.",
        "gs://bucket/run": "`path` must be a local or mounted directory",
    }
    for argument, text in wrong.items():
        assert inspect.main([argument]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and text in captured.err
    assert inspect.main([path, "--step", "7"]) == 2
    assert "holds no checkpoint of step 7. Try one of: 500, 1000, 1500." in capsys.readouterr().err


def test_a_checkpoint_that_training_deletes_meanwhile_is_left_out(path, capsys, monkeypatch):
    def check(self, record, *, deep=False):
        if record.step == 500:
            self.delete(record)
            return "state is missing."
        return None

    monkeypatch.setattr(CheckpointDirectory, "check", check)
    assert inspect.main([path]) == 0
    assert "2 checkpoints" in capsys.readouterr().out


def test_listing_imports_no_tensorflow_and_verifying_needs_it(tmp_path):
    """In a process of its own: the exit codes, and which of the heavy modules were imported."""
    path = str(tmp_path / "checkpoints")
    write = (
        "import sys, tensorflow as tf\n"
        "from tfdist_ext.checkpoint.directory import CheckpointDirectory\n"
        "from tfdist_ext.checkpoint.manifest import Manifest\n"
        "with CheckpointDirectory(sys.argv[1]).begin(5) as draft:\n"
        "    tf.train.Checkpoint(kernel=tf.Variable(tf.range(1000.0))).write(draft.path('model'))\n"
        "    files = draft.seal(['model.index', 'model.data-00000-of-00001'])\n"
        "    draft.commit(Manifest(step=5, attempt=draft.attempt, files=tuple(files)))\n"
    )
    assert _python(write, path).returncode == 0
    inspect_twice = (
        "import sys\nfrom tfdist_ext.launch import command\n"
        "code = command.main(['inspect', sys.argv[1]])\n"
        "heavy = [name for name in ('tensorflow', 'keras', 'numpy', 'zmq') if name in sys.modules]\n"
        "print('listed', code, heavy)\n"
        "print('verified', command.main(['inspect', sys.argv[1], '--verify']), 'tensorflow' in sys.modules)\n"
    )
    done = _python(inspect_twice, path)
    assert "  complete" in done.stdout and "listed 0 []" in done.stdout
    assert "  intact" in done.stdout and "verified 0 True" in done.stdout
    (record,) = CheckpointDirectory(path).records()
    with open(os.path.join(record.path, "model.data-00000-of-00001"), "r+b") as file:
        file.seek(2000)
        file.write(b"X")
    done = _python(inspect_twice, path)
    assert "listed 0 []" in done.stdout and "verified 1 True" in done.stdout
    assert "PROBLEM: Tensor kernel/.ATTRIBUTES/VARIABLE_VALUE of model is damaged" in done.stdout


def _python(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
