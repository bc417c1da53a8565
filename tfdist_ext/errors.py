"""Which run-time states can a caller catch?

Every class here is a state of a running job, not a programming mistake: a wrong argument is a plain
`ValueError` or `TypeError`. The classes carry the facts as attributes, so that a supervisor need not
read the message.
"""

from __future__ import annotations


class TfdistError(Exception):
    """Base of every error that tfdist_ext raises about the state of a job."""

    # Keras replaces an exception that crosses a layer by one made of its text alone, unless it finds this mark.
    _keras_call_info_injected = True


class ClusterSpecError(TfdistError, ValueError):
    """TF_CONFIG, or the cluster resolver, describes no usable cluster."""


class ConfigurationMismatchError(TfdistError, RuntimeError):
    """Two tasks of one job were started with settings that would silently train another model.

    Attributes:
        field: Name of the setting that differs, for instance `"keras_version"`.
        tasks: The two task names, for instance `("worker:0", "worker:1")`.
        values: The two values, in the order of `tasks`.
    """

    def __init__(self, message: str, *, field: str = "", tasks: tuple = (), values: tuple = ()):
        super().__init__(message)
        self.field = field
        self.tasks = tuple(tasks)
        self.values = tuple(values)


class AuthenticationError(TfdistError, RuntimeError):
    """A link may not be opened: no cluster secret where one is needed, or a wrong one."""


class StartupTimeoutError(TfdistError, TimeoutError):
    """Not every task of the cluster answered before the start-up deadline.

    Attributes:
        missing: Names and addresses of the absent tasks, `("worker:1 at 127.0.0.1:2222", ...)`.
        waited_seconds: Seconds waited.
    """

    def __init__(self, message: str, *, missing: tuple = (), waited_seconds: float = 0.0):
        super().__init__(message)
        self.missing = tuple(missing)
        self.waited_seconds = waited_seconds


class CollectiveError(TfdistError, RuntimeError):
    """A collective operation could not be completed.

    Attributes:
        task: The task that the error is about, for instance `"worker:1"`.
        collective: Name of the operation that was waiting, for instance `"gradients/3"`.
        step: Training step at which it happened, counted since this start of the program; None outside training.
        waited_seconds: Seconds this task had waited.
    """

    def __init__(
        self,
        message: str,
        *,
        task: str = "",
        collective: str = "",
        step: int | None = None,
        waited_seconds: float = 0.0,
    ):
        super().__init__(message)
        self.task = task
        self.collective = collective
        self.step = step
        self.waited_seconds = waited_seconds


class PeerLostError(CollectiveError):
    """Another task died, left, or stopped answering while this one needed it."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """Every task is alive, but one of them did not join a collective before its deadline."""


class SignatureMismatchError(CollectiveError):
    """Two tasks entered the same collective with different tensors or in a different order."""


class PeerInputError(CollectiveError):
    """Another task's input failed, or it left the loop, while this one still needed its rows."""


class ParameterServerLostError(TfdistError, RuntimeError):
    """A ps died, or has not answered for too long. Nobody else has its variables: start the job again.

    Attributes:
        task: The ps, for instance `"ps:0"`.
        step: Number of updates applied before, or None outside training.
    """

    def __init__(self, message: str, *, task: str = "", step: int | None = None):
        super().__init__(message)
        self.task = task
        self.step = step


class WorkersLostError(TfdistError, RuntimeError):
    """Too few workers are left, or a worker failed again and again, and the time to wait for it is over.

    Attributes:
        tasks: The workers that are missing, `("worker:1 at 127.0.0.1:2222", ...)`.
        step: Number of updates applied before, or None outside training.
    """

    def __init__(self, message: str, *, tasks: tuple = (), step: int | None = None):
        super().__init__(message)
        self.tasks = tuple(tasks)
        self.step = step


class CheckpointError(TfdistError, RuntimeError):
    """A checkpoint could not be written, read, or used; what was intact before still is.

    Attributes:
        path: The file or directory that the error is about.
    """

    def __init__(self, message: str, *, path: str = ""):
        super().__init__(message)
        self.path = path


class CheckpointCorruptError(CheckpointError):
    """A file of a checkpoint is not what was written: bytes are missing, or differ."""


class CheckpointIncompleteError(CheckpointError):
    """Something that training needs to go on exactly cannot be captured."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is intact but was made of something else: other names, shapes, or another format."""


class TPUUnavailableError(TfdistError, RuntimeError):
    """The TPU that the environment or the program names cannot be used; the message says how to mend it.

    Attributes:
        tpu: Its name or address.
    """

    def __init__(self, message: str, *, tpu: str = ""):
        super().__init__(message)
        self.tpu = tpu
