"""What must survive a crash?

Loaded when first used: the command that lists checkpoints does not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist_ext.checkpoint.keep_policies import BestN, LatestN
    from tfdist_ext.checkpoint.manager import TrainingCheckpointManager
    from tfdist_ext.checkpoint.resume_check import ResumeReport, assert_resumes_exactly, verify_resume
    from tfdist_ext.checkpoint.save_policies import EverySeconds, EverySteps, OverheadBudget
    from tfdist_ext.checkpoint.training_state import TrainingState

_MODULE_OF = {
    "BestN": "keep_policies",
    "EverySeconds": "save_policies",
    "EverySteps": "save_policies",
    "LatestN": "keep_policies",
    "OverheadBudget": "save_policies",
    "TrainingCheckpointManager": "manager",
    "ResumeReport": "resume_check",
    "TrainingState": "training_state",
    "assert_resumes_exactly": "resume_check",
    "verify_resume": "resume_check",
}

__all__ = [
    "BestN",
    "EverySeconds",
    "EverySteps",
    "LatestN",
    "OverheadBudget",
    "ResumeReport",
    "TrainingCheckpointManager",
    "TrainingState",
    "assert_resumes_exactly",
    "verify_resume",
]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tfdist_ext.checkpoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tfdist_ext.checkpoint.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
