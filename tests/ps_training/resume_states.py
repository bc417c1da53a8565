"""What `verify_resume` trains in processes of its own, each with a cluster inside."""

from tests.ps_training import checkpoint_programs
from tfdist_ext.checkpoint import TrainingState


def synchronous_state():
    """Returns the state of a network with dropout and reshuffled data, trained by rounds of two workers."""
    model, data = checkpoint_programs.random_network([2, 2], "synchronous")()
    return TrainingState(model, data)
