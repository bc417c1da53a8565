"""What can a checkpoint of somebody else's do to a program that restores it?"""

import keras
import pytest

from tests.checkpoint import jobs
from tfdist_ext import errors
from tfdist_ext.checkpoint.callback_states import CallbackStates


class Own(keras.callbacks.Callback):
    """A callback of the user's: a default of the class, a method, a property, and a file."""

    wait = 0

    def __init__(self):
        super().__init__()
        self.seen, self.folder = 0, "results"

    @property
    def path(self):
        return self.folder

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1


def loaded(callback, **attributes):
    """Gives a callback the state of a checkpoint; returns what was said of it."""
    callback.set_model(jobs.network())
    return CallbackStates([callback]).load(
        {type(callback).__name__: {"kind": "attributes", "state": attributes}}
    )


def test_h14_a_checkpoint_sets_only_what_keras_callbacks_remember(tmp_path):
    kept = keras.callbacks.ModelCheckpoint(tmp_path / "mine.keras", monitor="loss")
    notes = loaded(kept, filepath="/elsewhere.keras", best=0.5, verbose=9, on_epoch_end=3)
    assert (kept.filepath, kept.best, kept.verbose) == (str(tmp_path / "mine.keras"), 0.5, 0)
    assert callable(kept.on_epoch_end)
    assert len(notes) == 3 and "`filepath` of ModelCheckpoint" in notes[0]


@pytest.mark.parametrize(
    "attribute, value",
    [
        ("model", 1),
        ("params", {}),
        ("path", "x"),
        ("on_epoch_end", "x"),
        ("__class__", 1),
        ("_model", 1),
        ("folder", "/etc"),
        ("folder", "..\\up"),
    ],
)
def test_h14_no_method_property_or_path_of_a_callback_is_set(attribute, value):
    own = Own()
    before = {name: getattr(own, name) for name in ("path", "folder", "params", "__class__")}
    (note,) = loaded(own, **{attribute: value})
    assert f"`{attribute}` of Own" in note
    assert before == {name: getattr(own, name) for name in before}
    assert callable(own.on_epoch_end)


def test_h14_what_a_callback_of_the_users_counts_is_set():
    own = Own()
    assert loaded(own, seen=3, wait=2, folder="phase two", later=[1]) == []
    assert (own.seen, own.wait, own.folder, own.later) == (3, 2, "phase two", [1])


def test_h14_a_callback_whose_state_is_a_path_is_named_when_it_is_saved(tmp_path):
    class Moves(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            # This one is set again by the run that resumes.
            self.first_folder = str(tmp_path)

        def on_epoch_end(self, epoch, logs=None):
            self.folder = str(tmp_path / f"{epoch}")

    with pytest.raises(errors.CheckpointIncompleteError, match="Moves: `folder` is a path"):
        jobs.fit(jobs.manager(tmp_path), Moves())
