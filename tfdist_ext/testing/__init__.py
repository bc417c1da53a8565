"""How do I break it on purpose?

`WorkerPool` runs functions on groups of worker processes that are already started; `start_processes` starts a
group of its own for a test that kills or stops one of them. Importing this folder does not import TensorFlow.
"""

from tfdist_ext.testing.outcomes import Failure, Outcome, WorkerJobError, WorkerJobTimeout
from tfdist_ext.testing.worker_group import WorkerGroup, start_group, start_processes
from tfdist_ext.testing.worker_pool import WorkerPool

__all__ = [
    "Failure",
    "Outcome",
    "WorkerGroup",
    "WorkerJobError",
    "WorkerJobTimeout",
    "WorkerPool",
    "start_group",
    "start_processes",
]
