"""Who is there?

TF_CONFIG, a cluster resolver or nothing becomes one validated, frozen `ClusterSpecification`; at start the
tasks compare their settings. Importing this folder does not import TensorFlow.
"""

from tfdist_ext.cluster.preflight import check_records, describe_this_task
from tfdist_ext.cluster.resolver import as_tf_resolver, resolve
from tfdist_ext.cluster.specification import ClusterSpecification, Task
from tfdist_ext.cluster.tf_config import from_tf_config, to_tf_config

__all__ = [
    "ClusterSpecification",
    "Task",
    "as_tf_resolver",
    "check_records",
    "describe_this_task",
    "from_tf_config",
    "resolve",
    "to_tf_config",
]
