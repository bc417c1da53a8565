"""A manifest is read back as it was written, or refused with the name of the field."""

import hashlib
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.checkpoint.manifest import (
    CRC32C_PER_TENSOR,
    FileRecord,
    Manifest,
    Piece,
    TensorRecord,
    sha256_checksum,
)
from tfdist_ext.errors import CheckpointCorruptError, CheckpointMismatchError

MANIFEST = Manifest(
    step=500,
    attempt="3f9a1c2e",
    epoch=2,
    batch=7,
    created_unix_seconds=1_900_000_000.25,
    metrics={"loss": 0.1, "val_loss": math.inf},
    files=(
        FileRecord(name="state.index", num_bytes=5, checksum=sha256_checksum(b"index")),
        FileRecord(name="state.data-00000-of-00001", num_bytes=48, checksum=CRC32C_PER_TENSOR),
    ),
    tensors=(
        TensorRecord(name="dense/kernel", dtype="float32", shape=(3, 4)),
        TensorRecord(name="graph", dtype="string"),
    ),
    pieces=(
        Piece(name="model", captured=True),
        Piece(name="input", captured=False, reason="it is a generator"),
    ),
    cluster={"tasks": ["worker:0", "worker:1"]},
    fingerprint={"tensorflow": "2.21.0", "strategy": None},
    input={"mode": "skip", "rows": 1200},
)


def fields_of(manifest=MANIFEST):
    return json.loads(manifest.to_json())


def sealed(fields):
    """The fields with the checksum that fits them, by the rule: SHA-256 of the sorted JSON of all others."""
    rest = {name: value for name, value in fields.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    return json.dumps({**rest, "checksum": f"sha256:{digest}"})


def test_it_is_read_as_it_was_written():
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Manifest.from_json(sealed(fields_of())) == MANIFEST


def test_it_is_plain_json_which_knows_no_nan():
    text = Manifest(step=1, attempt="a", metrics={"a": math.nan, "b": -math.inf, "c": 1e300}).to_json()

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(text, parse_constant=refuse)["metrics"] == {"a": "NaN", "b": "-Infinity", "c": 1e300}
    metrics = Manifest.from_json(text).metrics
    assert math.isnan(metrics["a"]) and metrics["b"] == -math.inf and metrics["c"] == 1e300


names = st.text(min_size=1, max_size=8)
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**60), 2**60),
        st.floats(allow_nan=False, allow_infinity=False),
        names,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)
manifests = st.builds(
    Manifest,
    step=st.integers(0, 2**60),
    attempt=names,
    epoch=st.integers(0, 99),
    batch=st.integers(0, 99),
    created_unix_seconds=st.floats(0, 1e10),
    metrics=st.dictionaries(names, st.floats(allow_nan=False)),
    tensors=st.lists(
        st.builds(
            TensorRecord,
            name=names,
            dtype=st.sampled_from(["float32", "string"]),
            shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        max_size=3,
        unique_by=lambda tensor: tensor.name,
    ).map(tuple),
    pieces=st.lists(
        st.builds(Piece, name=names, captured=st.booleans(), reason=st.text(max_size=9)), max_size=1
    ).map(tuple),
    cluster=st.dictionaries(names, json_values, max_size=3),
    input=st.dictionaries(names, json_values, max_size=3),
)


@hypothesis.given(manifests)
def test_any_manifest_is_read_as_it_was_written(manifest):
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_keys_that_are_numbers_become_texts():
    manifest = Manifest(step=1, attempt="a", input={"rows": {10: 3, 9: (4, 5)}})
    assert Manifest.from_json(manifest.to_json()).input == {"rows": {"10": 3, "9": [4, 5]}}


@pytest.mark.parametrize("position", range(0, len(MANIFEST.to_json()), 7))
def test_a_flipped_byte_changes_nothing_unnoticed(position):
    data = bytearray(MANIFEST.to_json().encode())
    data[position] ^= 1
    try:
        read = Manifest.from_json(bytes(data))
    except (CheckpointCorruptError, CheckpointMismatchError):
        return
    assert read == MANIFEST  # A space became another one.


@pytest.mark.parametrize("length", [0, 1, 100, len(MANIFEST.to_json()) - 3])
def test_a_torn_file_is_refused(length):
    with pytest.raises(CheckpointCorruptError, match="DIR/manifest.json is damaged: it is no JSON"):
        Manifest.from_json(MANIFEST.to_json()[:length], source="DIR/manifest.json")


def test_another_format_is_refused_with_both_versions():
    with pytest.raises(
        CheckpointMismatchError, match="m.json has `format_version` 2; .* reads 1. Try the version"
    ) as caught:
        Manifest.from_json(sealed({**fields_of(), "format_version": 2, "new_field": 1}), source="m.json")
    assert caught.value.path == "m.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "500"}, '`step` must be a whole number; it is "500"'),
        ({"step": True}, "`step` must be a whole number; it is true"),
        ({"step": -1}, "`step` must not be negative; it is -1"),
        ({"format_version": "1"}, "`format_version` must be a whole number"),
        ({"metrics": []}, "`metrics` must be an object"),
        ({"metrics": {"loss": "nan"}}, '`metrics.loss` must be a number; it is "nan"'),
        ({"files": [{"name": "a", "num_bytes": 1}]}, "`files.0.checksum` is missing"),
        (
            {"files": [{"name": "../a", "num_bytes": 1, "checksum": CRC32C_PER_TENSOR}]},
            "`files.0` is refused: .*plain",
        ),
        (
            {"files": [{"name": "a", "num_bytes": 1, "checksum": "md5:0"}]},
            "`files.0` is refused: .*`checksum`",
        ),
        (
            {"tensors": [{"name": "a", "dtype": "int8", "shape": [2, None]}]},
            "`tensors.0.shape.1` must be a whole number",
        ),
        (
            {"pieces": [{"name": "a", "captured": 1, "reason": ""}]},
            "`pieces.0.captured` must be true or false",
        ),
        ({"colour": "red"}, "`colour` is unknown"),
        ({"pieces": [{"name": "a", "captured": True, "reason": ""}] * 2}, "`pieces`.*'a' twice"),
    ],
)
def test_a_malformed_field_is_named(change, message):
    with pytest.raises(CheckpointCorruptError, match=message):
        Manifest.from_json(sealed({**fields_of(), **change}))


@pytest.mark.parametrize("name", sorted(fields_of()))
def test_a_missing_field_is_named(name):
    fields = fields_of()
    del fields[name]
    if name == "checksum":
        text = json.dumps(fields)
        expected = "`checksum` does not fit the content"
    else:
        text = sealed(fields)
        expected = f"`{name}` is missing"
    with pytest.raises(CheckpointCorruptError, match=expected):
        Manifest.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"step": NaN}', "[" * 100_000, b"\xff\xfe\x00"])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointCorruptError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("float32", (3, 4), 48),
        ("float64", (), 8),
        ("bfloat16", (5,), 10),
        ("complex128", (2,), 32),
        ("bool", (7,), 7),
        ("qint32", (2,), 8),
        ("float8_e4m3fn", (6,), 6),
        ("int4", (6,), 6),  # TensorFlow keeps four bits in a byte.
        ("int64", (0, 9), 0),
        ("string", (3,), None),
        ("variant", (), None),
    ],
)
def test_bytes_of_a_tensor(dtype, shape, num_bytes):
    assert TensorRecord(name="t", dtype=dtype, shape=shape).num_bytes == num_bytes


def test_bytes_of_a_checkpoint():
    assert MANIFEST.num_bytes == 5 + 48
