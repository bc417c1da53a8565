"""What does a layer take? Kinds of inputs, and the rows that a program is fed."""

import dataclasses
import zlib

import numpy as np

ROWS = 13
"""In global batches of 6: 6, 6 and 1, so that the last has fewer rows than there are replicas."""
BATCH_ROWS = 6


@dataclasses.dataclass(frozen=True)
class Input:
    """One input: how the rows are drawn from a NumPy generator, and the shape of a row."""

    kind: str
    shape: tuple
    dtype: str
    draw: object = dataclasses.field(compare=False)

    @property
    def name(self):
        """Returns the same name for the same input: branches of a model share it."""
        return "_".join([self.kind, *map(str, self.shape), self.dtype])

    def rows(self, count=ROWS, salt=""):
        """Returns rows that depend on the name alone: the same in whatever program they stand."""
        generator = np.random.default_rng(zlib.crc32((self.name + salt).encode()))
        values = self.draw(generator, (count, *self.shape))
        return values.astype(object if self.dtype == "string" else self.dtype)


def normal(*shape):
    return Input("normal", shape, "float64", lambda generator, size: generator.normal(size=size))


def positive(*shape):
    return Input("positive", shape, "float64", lambda generator, size: generator.uniform(0.1, 0.9, size=size))


def images(*shape):
    return Input("images", shape, "float64", lambda generator, size: generator.integers(0, 256, size=size))


def ones(*shape):
    return Input("ones", shape, "float64", lambda generator, size: np.ones(size))


def ids(*shape, below=5, kind="ids"):
    def draw(generator, size):
        return generator.integers(0, below, size=size)

    return Input(f"{kind}_below_{below}", shape, "int64", draw)


def classes(count):
    """One of so many classes, one-hot."""
    return Input(
        "classes",
        (count,),
        "float64",
        lambda generator, size: np.eye(count)[generator.integers(0, count, size[0])],
    )


def signs(*shape):
    return Input("signs", shape, "float64", lambda generator, size: generator.choice([-1.0, 1.0], size=size))


def labels(*shape, below):
    """Numbers from 1 on."""
    return Input("labels", shape, "int64", lambda generator, size: generator.integers(1, below, size=size))


def words(*shape):
    vocabulary = np.array(["red", "green", "blue", "a green hat", "nothing red"], dtype=object)
    return Input("words", shape, "string", lambda generator, size: generator.choice(vocabulary, size=size))


def padded(steps, features):
    """Sequences whose last steps are zeros: what `Masking` hides."""

    def draw(generator, size):
        lengths = generator.integers(1, steps + 1, size=(size[0], 1, 1))
        return generator.normal(size=size) * (np.arange(steps)[None, :, None] < lengths)

    return Input("padded", (steps, features), "float64", draw)
