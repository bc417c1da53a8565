"""How stale may a worker be, and whom do we wait for?

Policies say it, `Ledger` decides by them and keeps the books, `Leases` knows which batch comes next. All of it is
plain Python: no TensorFlow, no threads, and time comes from a clock that is an argument.
"""

from tfdist_ext.ps.clocks import FreeRule
from tfdist_ext.ps.damping import ExponentialStaleness, HyperbolicStaleness, InverseStaleness
from tfdist_ext.ps.exceptions import ShardMismatch, TooFewWorkers
from tfdist_ext.ps.leases import Batch, Leases
from tfdist_ext.ps.ledger import Ledger
from tfdist_ext.ps.policies import Asynchronous, BoundedStaleness, Synchronous
from tfdist_ext.ps.records import AdmittedSet, Apply, Dispatch, DroppedSet, Verdict
from tfdist_ext.ps.resharding import resharded
from tfdist_ext.ps.resuming import ResumableLedger
from tfdist_ext.ps.rule import Choice, Drop, Policy, Rule
from tfdist_ext.ps.state import SetRecord, State, Status
from tfdist_ext.ps.statistics import Statistics, WorkerStatistics

__all__ = [
    "AdmittedSet",
    "Apply",
    "Asynchronous",
    "Batch",
    "BoundedStaleness",
    "Choice",
    "Dispatch",
    "Drop",
    "DroppedSet",
    "ExponentialStaleness",
    "FreeRule",
    "HyperbolicStaleness",
    "InverseStaleness",
    "Leases",
    "Ledger",
    "Policy",
    "ResumableLedger",
    "Rule",
    "SetRecord",
    "ShardMismatch",
    "State",
    "Statistics",
    "Status",
    "Synchronous",
    "TooFewWorkers",
    "Verdict",
    "WorkerStatistics",
    "resharded",
]
