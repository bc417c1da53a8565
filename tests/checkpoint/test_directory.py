"""A directory lists, checks, replaces and deletes checkpoints, whoever else is at it."""

import os
import re
import threading

import pytest

from tests.checkpoint.disks import intact, save
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.file_system import LocalFileSystem
from tfdist_ext.checkpoint.layout import new_attempt
from tfdist_ext.checkpoint.manifest import CRC32C_PER_TENSOR, FileRecord, Manifest, sha256_checksum
from tfdist_ext.errors import CheckpointError


@pytest.fixture
def directory(tmp_path):
    return CheckpointDirectory(tmp_path / "run" / "checkpoints")


def test_the_files_of_a_checkpoint(directory):
    record = save(directory, 500, "3f9a1c2e", b"abc")
    assert record.path == os.path.join(directory.path, "checkpoint-0000000500-3f9a1c2e")
    assert sorted(os.listdir(record.path)) == ["manifest.json", "position.json", "state"]
    assert directory.records() == [record]
    assert record.manifest.files == (
        # echo -n abc | sha256sum
        FileRecord(
            name="state",
            num_bytes=3,
            checksum="sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ),
        FileRecord(name="position.json", num_bytes=2, checksum=sha256_checksum(b"{}")),
    )
    assert record.num_bytes == 5 and record.problem is None and directory.check(record) is None


def test_a_directory_that_is_not_there_holds_nothing_and_is_not_made(directory):
    assert directory.records() == [] and directory.newest_first() == []
    assert directory.sweep() == []
    assert not os.path.exists(directory.path)


def test_records_are_in_the_order_of_the_steps_and_the_newest_is_the_last_commit(directory):
    for step in (1000, 20, 12_345_678_901, 300):
        save(directory, step)
    steps = [record.step for record in directory.records()]
    assert steps == [20, 300, 1000, 12_345_678_901]
    # New is what was committed last.
    assert [record.step for record in directory.newest_first()] == [300, 12_345_678_901, 20, 1000]


def test_what_is_not_ours_is_not_a_checkpoint(directory):
    save(directory, 1)
    for name in (
        "checkpoint",
        "checkpoint-1-a",
        "checkpoint-0000000002-a.zip",
        "logs",
        ".draft-0000000003-a",
    ):
        os.mkdir(os.path.join(directory.path, name))
    assert [record.step for record in directory.records()] == [1]


def test_no_manifest_no_checkpoint(directory):
    with directory.begin(7, "a") as draft:
        draft.write_bytes("state", b"x")
        draft.seal(["state"])
    assert directory.records() == []
    os.rename(draft.folder, os.path.join(directory.path, "checkpoint-0000000007-a"))
    (record,) = directory.records()
    assert record.manifest is None and record.num_bytes == 0
    expected = "manifest.json cannot be read (No such file or directory), so this is no checkpoint."
    assert directory.check(record) == record.problem == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "manifest.json is damaged: it is no JSON"),
        (b'{"format_version": 9}', "`format_version` 9; this version of tfdist_ext reads 1"),
        (
            Manifest(step=8, attempt="a").to_json().encode(),
            "named for step 7, attempt a, .* for step 8, attempt a",
        ),
    ],
)
def test_an_unreadable_manifest_is_a_problem_of_its_record_alone(directory, content, problem):
    record = save(directory, 7, "a")
    good = save(directory, 6)
    LocalFileSystem().write(os.path.join(record.path, "manifest.json"), content)
    assert [bad.manifest for bad in directory.newest_first()] == [None, good.manifest]
    bad = directory.newest_first()[0]
    assert re.search(problem, bad.problem) and directory.check(bad) == bad.problem


@pytest.mark.parametrize("name", ["state", "position.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_a_flipped_byte_a_cut_or_a_missing_file_is_found(directory, name, damage):
    record = save(directory, 7, content=bytes(100))
    path = os.path.join(record.path, name)
    content = LocalFileSystem().read(path)
    changed = {"flip": bytes([content[0] ^ 1]) + content[1:], "cut": content[:-1], "grow": content + b"\0"}
    if damage == "remove":
        os.remove(path)
    else:
        LocalFileSystem().write(path, changed[damage])
    expected = {
        "flip": f"{name} is damaged: its checksum is not the one that was written.",
        "cut": f"{name} has {len(content) - 1} bytes instead of {len(content)}.",
        "grow": f"{name} has {len(content) + 1} bytes instead of {len(content)}.",
        "remove": f"{name} is missing.",
    }
    assert directory.check(record) == expected[damage]


def test_a_flipped_byte_in_any_place_of_the_manifest_is_found(directory):
    record = save(directory, 7)
    path = os.path.join(record.path, "manifest.json")
    content = LocalFileSystem().read(path)
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 4
        LocalFileSystem().write(path, bytes(flipped))
        (found,) = directory.records()
        assert found.problem is not None, content[position:]


def save_bundle(directory):
    with directory.begin(3, "a") as draft:
        for name in (
            "model.index",
            "model.data-00000-of-00002",
            "model.data-00001-of-00002",
            "w1.data-00000-of-00001",
        ):
            draft.write_bytes(name, name.encode())
        files = draft.seal(sorted(os.listdir(draft.folder)))
        return draft.commit(Manifest(step=3, attempt="a", files=tuple(files)))


def test_the_tensors_of_a_bundle_are_read_only_in_a_deep_check(tmp_path):
    read = []

    def verify_bundle(prefix):
        read.append(os.path.basename(prefix))
        return "Tensor w is damaged." if prefix.endswith("w1") else None

    directory = CheckpointDirectory(tmp_path, verify_bundle=verify_bundle)
    record = save_bundle(directory)
    checksums = {file.name: file.checksum for file in record.manifest.files}
    assert checksums.pop("model.index") == sha256_checksum(b"model.index")
    assert set(checksums.values()) == {CRC32C_PER_TENSOR} and len(checksums) == 3
    assert directory.check(record) is None and read == []
    assert directory.check(record, deep=True) == "Tensor w is damaged." and read == ["model", "w1"]
    # The size of a data file counts without reading it.
    LocalFileSystem().write(os.path.join(record.path, "model.data-00001-of-00002"), b"")
    assert directory.check(record) == "model.data-00001-of-00002 has 0 bytes instead of 25."


def test_c12_two_tasks_write_one_checkpoint(tmp_path):
    """Each task its own file of the same draft, at the same time; the chief commits what both sealed."""
    attempt, sealed, barrier = new_attempt(), {}, threading.Barrier(2)

    def write(task):
        with CheckpointDirectory(tmp_path / "new").begin(100, attempt) as draft:
            barrier.wait(timeout=30)
            draft.write_bytes(f"worker-{task}.json", f"[{task}]".encode())
            sealed[task] = (draft, draft.seal([f"worker-{task}.json"]))

    threads = [threading.Thread(target=write, args=(task,)) for task in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = tuple(file for _, records in sealed.values() for file in records)
    sealed[0][0].commit(Manifest(step=100, attempt=attempt, files=files))
    directory = CheckpointDirectory(tmp_path / "new")
    (record,) = directory.records()
    assert directory.check(record) is None
    assert sorted(os.listdir(record.path)) == ["manifest.json", "worker-0.json", "worker-1.json"]
    assert os.listdir(directory.path) == [os.path.basename(record.path)]


@pytest.mark.parametrize(
    ("num_bytes", "found"),
    [(None, "written with 5 bytes, is missing"), (3, "written with 5 bytes, has 3 bytes")],
)
def test_a_task_that_wrote_to_a_disk_of_its_own_is_found_at_the_commit(directory, num_bytes, found):
    save(directory, 1, "a", b"one")
    draft = directory.begin(2, "b")
    if num_bytes is not None:
        draft.write_bytes("worker-1.json", bytes(num_bytes))
    elsewhere = FileRecord(name="worker-1.json", num_bytes=5, checksum=sha256_checksum(b"12345"))
    with pytest.raises(CheckpointError, match=f"Cannot commit step 2 .* worker-1.json, {found}.*share"):
        draft.commit(Manifest(step=2, attempt="b", files=(elsewhere,)))
    assert intact(directory.path) == [(1, b"one")] and len(os.listdir(directory.path)) == 1


def test_a_step_saved_again_replaces_the_old_one_whatever_the_clock_says(directory):
    save(directory, 10, "a", b"old", created=1000.0)
    record = save(directory, 10, "b", b"new", created=1.0)
    assert intact(directory.path) == [(10, b"new")]
    assert os.listdir(directory.path) == ["checkpoint-0000000010-b"]
    assert record.manifest.created_unix_seconds == 1000.001


def test_a_draft_that_raises_or_is_abandoned_is_gone(directory):
    with pytest.raises(ZeroDivisionError):
        with directory.begin(1) as draft:
            draft.write_bytes("state", b"x")
            os.mkdir(draft.path("state_temp"))  # TensorFlow makes such a folder beside a bundle.
            draft.seal([1 / 0])
    assert os.listdir(directory.path) == []
    draft.abandon()  # Twice is once.
    draft = directory.begin(1)
    with pytest.raises(CheckpointError, match="no-such-file is gone. Another task gave this save up"):
        draft.seal(["no-such-file"])
    assert os.listdir(directory.path) == []


def test_abandoning_after_the_commit_does_nothing(directory):
    with pytest.raises(ZeroDivisionError):
        with directory.begin(1, "a") as draft:
            draft.commit(Manifest(step=1, attempt="a"))
            raise ZeroDivisionError
    assert len(directory.records()) == 1


def test_deleting_twice_is_deleting_once(directory):
    record = save(directory, 1)
    directory.delete(record)
    directory.delete(record)
    assert os.listdir(directory.path) == [] and directory.check(record) == "state is missing."


def test_an_evaluator_may_read_while_training_deletes(tmp_path):
    """The checkpoint of step 1 vanishes after its name was listed, before its manifest is read."""

    class Deleting(LocalFileSystem):
        def read(self, path):
            if "0000000001" in path:
                CheckpointDirectory(tmp_path).delete(first)
            return super().read(path)

    first = save(CheckpointDirectory(tmp_path), 1)
    save(CheckpointDirectory(tmp_path), 2)
    reader = CheckpointDirectory(tmp_path, file_system=Deleting())
    assert [record.step for record in reader.records()] == [2]


@pytest.fixture
def littered(directory):
    """Everything a sweep may meet; what was written last in each draft is set by `at`."""
    save(directory, 10, "a")
    for step, attempt in ((20, "old"), (21, "alive"), (22, "new")):
        directory.begin(step, attempt).write_bytes("state", b"half")
    at(directory, ".draft-0000000020-old", 1000.0)
    at(directory, ".draft-0000000021-alive", 1000.0)
    at(directory, ".draft-0000000022-new", 1000.0, file_seconds=4000.0)
    for name in (".deleted-0000000005-gone/temporary", "tensorboard", ".drafts"):
        os.makedirs(os.path.join(directory.path, name))
    return directory


def at(directory, name, seconds, file_seconds=None):
    path = os.path.join(directory.path, name)
    os.utime(os.path.join(path, "state"), (0, file_seconds or seconds))
    os.utime(path, (0, seconds))


def test_a_sweep_removes_what_dead_attempts_left_and_nothing_else(littered):
    directory = CheckpointDirectory(littered.path, clock=lambda: 5000.0)
    assert directory.sweep(older_than_seconds=3600.0, keep_attempts=["alive"]) == [
        ".deleted-0000000005-gone",
        ".draft-0000000020-old",
    ]
    left = [
        ".draft-0000000021-alive",
        ".draft-0000000022-new",
        ".drafts",
        "checkpoint-0000000010-a",
        "tensorboard",
    ]
    assert sorted(os.listdir(directory.path)) == left
    # At 7,700 s the last write, at 4,000 s, is older than an hour too.
    assert CheckpointDirectory(littered.path, clock=lambda: 7700.0).sweep() == left[:2]


def test_a_sweep_follows_no_link(directory, tmp_path):
    save(directory, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    for name in (".draft-0000000001-a", ".deleted-0000000001-b"):
        os.symlink(outside, os.path.join(directory.path, name))
    os.mkdir(os.path.join(directory.path, ".deleted-0000000002-c"))
    os.symlink(outside, os.path.join(directory.path, ".deleted-0000000002-c", "link"))
    assert directory.sweep(older_than_seconds=-1.0) == [".deleted-0000000002-c"]
    assert (outside / "precious").exists()


def save_two_of_one_step(directory):
    """As a crash between the commit and the deletion leaves them; returns the folder of the newer one."""
    newer = save(directory, 10, "b", b"new", created=200.0)
    aside = os.path.join(directory.path, "aside")
    os.rename(newer.path, aside)
    save(directory, 10, "a", b"old", created=100.0)
    os.rename(aside, newer.path)
    return newer.path


def test_of_two_saves_of_a_step_the_newer_comes_first_and_a_sweep_removes_the_other(directory):
    save_two_of_one_step(directory)
    assert intact(directory.path) == [(10, b"new"), (10, b"old")]
    assert directory.sweep() == ["checkpoint-0000000010-a"]
    assert intact(directory.path) == [(10, b"new")]


def test_a_sweep_keeps_the_older_save_of_a_step_while_the_newer_is_damaged(directory):
    newer = save_two_of_one_step(directory)
    LocalFileSystem().write(os.path.join(newer, "state"), b"bad")
    assert directory.sweep() == []
    assert [directory.check(record) for record in directory.newest_first()] == [
        "state is damaged: its checksum is not the one that was written.",
        None,
    ]


def test_a_path_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    directory = CheckpointDirectory(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file is a file, not a directory. Try the directory it is in"):
        directory.records()
    for path in ("file", "file/below"):
        with pytest.raises(CheckpointError, match="/file is a file, not a directory. Choose another"):
            CheckpointDirectory(tmp_path / path).begin(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda directory: CheckpointDirectory("gs://bucket/run"),
            "`path` must be a local or mounted directory.*gs://",
        ),
        (lambda directory: directory.begin(-1), "`step` and `attempt`.*received -1"),
        (lambda directory: directory.begin(1, "../x"), "received 1 and '../x'"),
        (lambda directory: directory.begin(1, ""), "received 1 and ''"),
        (
            lambda directory: directory.begin(1, "a").commit(Manifest(step=2, attempt="a")),
            "`manifest` must be of step 1",
        ),
        (
            lambda directory: directory.begin(1, "a").commit(Manifest(step=1, attempt="b")),
            "attempt 'a'; received step 1",
        ),
    ],
)
def test_refusals_name_the_argument_and_the_value(directory, make, message):
    with pytest.raises(ValueError, match=message):
        make(directory)


def test_attempts_are_random():
    tokens = {new_attempt() for _ in range(100)}
    assert len(tokens) == 100 and all(re.fullmatch("[0-9a-f]{8}", token) for token in tokens)
