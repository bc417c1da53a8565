"""What crosses to another process arrives as it was, and nothing else crosses."""

import io

import ml_dtypes
import numpy as np
import pytest

from tfdist_ext.testing import messages


def over_the_wire(value):
    stream = io.BytesIO()
    messages.write_message(stream, value)
    stream.seek(0)
    return messages.read_message(stream)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        1e300,
        float("-inf"),
        "text \u20ac",
        b"\x00\xff",
        [1, [2, []]],
        (1, (2.5, "x")),
        {"a": {1: [None]}, ("x", 2): False},
        {},
    ],
)
def test_plain_values(value):
    found = over_the_wire(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint64, bool, "U3"]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    found = over_the_wire({"x": [array]})["x"][0]
    assert found.dtype == array.dtype and found.shape == shape and (found == array).all()
    assert found.flags.writeable


def test_scalars_and_fortran_order():
    assert isinstance(over_the_wire(np.float32(0.1)), np.float32)
    assert over_the_wire(np.float32(0.1)) == np.float32(0.1)
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert over_the_wire(array).tolist() == array.tolist()


def test_a_tensor_arrives_as_an_array():
    class Tensor:
        def numpy(self):
            return np.ones(2)

    assert over_the_wire((Tensor(),))[0].tolist() == [1, 1]


def test_what_does_not_cross_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"value\['a'\]\[1\] is a set"):
        over_the_wire({"a": [1, {2}]})
    with pytest.raises(TypeError, match="array of Python objects"):
        over_the_wire([np.array([object()])])


def test_an_end_in_the_middle_is_an_end():
    stream = io.BytesIO()
    messages.write_message(stream, np.ones(9))
    with pytest.raises(EOFError):
        messages.read_message(io.BytesIO(stream.getvalue()[:-1]))
