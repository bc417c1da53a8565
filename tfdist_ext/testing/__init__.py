"""How do I break it on purpose?

`WorkerPool` runs functions on groups of worker processes that are already started; `start_processes` starts a
group of its own for a test that kills or stops one of them. `check_update_policy` runs an update policy of one's own
against what workers may do to it. Importing this folder does not import TensorFlow. Worker processes are forked
by a process that has imported it, which needs Linux.
"""

from tfdist_ext.testing.ledger_chaos import LedgerChaos, PolicyConformanceError
from tfdist_ext.testing.outcomes import Failure, Outcome, WorkerJobError, WorkerJobTimeout
from tfdist_ext.testing.policy_conformance import check_update_policy
from tfdist_ext.testing.worker_group import WorkerGroup, start_group, start_processes
from tfdist_ext.testing.worker_pool import WorkerPool

__all__ = [
    "Failure",
    "LedgerChaos",
    "Outcome",
    "PolicyConformanceError",
    "WorkerGroup",
    "WorkerJobError",
    "WorkerJobTimeout",
    "WorkerPool",
    "check_update_policy",
    "start_group",
    "start_processes",
]
