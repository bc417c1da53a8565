"""Who is there?

TF_CONFIG, a cluster resolver or nothing becomes one validated, frozen `ClusterSpecification`; at start the
tasks compare their settings. Servers of parameter-server jobs are started, watched and ended here. Importing
this folder does not import TensorFlow.
"""

from tfdist_ext.cluster.choice import StrategyChoice, Surroundings, choose
from tfdist_ext.cluster.control import ping
from tfdist_ext.cluster.goodbye import say_goodbye_at_exit
from tfdist_ext.cluster.in_process import in_process
from tfdist_ext.cluster.preflight import check_records, describe_this_task
from tfdist_ext.cluster.reachability import listening, wait_for_tasks
from tfdist_ext.cluster.resolver import as_tf_resolver, resolve
from tfdist_ext.cluster.serving import ServingExit, serve_until_chief_ends
from tfdist_ext.cluster.slurm import from_slurm
from tfdist_ext.cluster.specification import ClusterSpecification, Task
from tfdist_ext.cluster.tf_config import from_tf_config, to_tf_config
from tfdist_ext.cluster.tpu_chips import find_tpu

__all__ = [
    "ClusterSpecification",
    "ServingExit",
    "StrategyChoice",
    "Surroundings",
    "Task",
    "as_tf_resolver",
    "check_records",
    "choose",
    "describe_this_task",
    "find_tpu",
    "from_slurm",
    "from_tf_config",
    "in_process",
    "listening",
    "ping",
    "resolve",
    "say_goodbye_at_exit",
    "serve_until_chief_ends",
    "to_tf_config",
    "wait_for_tasks",
]
