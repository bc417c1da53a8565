"""Which private names of TensorFlow and Keras does the package lean on?

This is the only file that may touch them. Each is listed once, with the reason; everything else imports
it from here. A new TensorFlow or Keras release is checked against this one page.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import os
import random
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state as keras_global_state
from keras.src.backend.common import masking as keras_masking
from keras.src.backend.tensorflow import random as keras_random
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import array_data_adapter, py_dataset_adapter
from keras.src.utils import python_utils as keras_python_utils
from tensorflow.core.framework import dataset_options_pb2
from tensorflow.core.protobuf import trackable_object_graph_pb2
from tensorflow.python.autograph.core import ag_ctx as autograph_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.checkpoint import graph_view, save_util, tensor_callable
from tensorflow.python.data.ops import dataset_ops, interleave_op
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_lib,
    distribute_utils,
    mirrored_run,
    mirrored_strategy,
    numpy_dataset,
    one_device_strategy,
    parameter_server_strategy_v2,
    sharded_variable,
    values,
    values_util,
)
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import executor as eager_executor
from tensorflow.python.eager import record as tape_record
from tensorflow.python.eager import remote as eager_remote
from tensorflow.python.eager import tape as gradient_tape
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.framework import composite_tensor, constant_op, ops
from tensorflow.python.ops import gen_experimental_dataset_ops, script_ops, stateful_random_ops
from tensorflow.python.trackable import base as trackable_base
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.util import deprecation, nest

# --- Strategies: their extended objects are the seam that every tf.distribute call goes through. -----------
CollectiveAllReduceExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
MirroredExtended = mirrored_strategy.MirroredExtended
CommunicationOptions = collective_util.Options
CollectiveKeys = cross_device_utils.CollectiveKeys
TensorFlowCollectives = cross_device_ops.CollectiveAllReduce
InputContext = distribute_lib.InputContext
ReplicaContext = distribute_lib.ReplicaContext
UpdateContext = distribute_lib.UpdateContext
ValueContext = distribute_lib.ValueContext
SingleDevice = numpy_dataset.SingleDevice
call_for_each_replica_in_threads = mirrored_run.call_for_each_replica
select_replica = distribute_utils.select_replica
regroup = distribute_utils.regroup
create_mirrored_variable = distribute_utils.create_mirrored_variable
variable_class_mapping = distribute_utils.VARIABLE_CLASS_MAPPING
variable_policy_mapping = distribute_utils.VARIABLE_POLICY_MAPPING
in_replica_update_context = values_util.in_replica_update_context
in_saving_context = values_util.is_saving_non_distributed
enter_or_assert_strategy = distribute_lib.enter_or_assert_strategy
broadcast_to_devices = cross_device_ops.simple_broadcast
copy_to_device = cross_device_utils.copy_tensor_or_indexed_slices_to_device

ParameterServerExtended = parameter_server_strategy_v2.ParameterServerStrategyV2Extended
ShardedVariable = sharded_variable.ShardedVariable
OneDeviceExtended = one_device_strategy.OneDeviceExtended

# Keras knows a distributed dataset by the name and the module of one of its base classes.
DistributedDataset: Any = type(
    "DistributedDataset",
    (tf.distribute.DistributedDataset,),
    {"__module__": tf.distribute.DistributedDataset.__module__},
)

# --- Values and variables -----------------------------------------------------------------------------------
DistributedValues = values.DistributedValues
DistributedVariable = values.DistributedVariable
Mirrored = values.Mirrored
MirroredVariable = values.MirroredVariable
PerReplica = values.PerReplica
SyncOnReadVariable = values.SyncOnReadVariable
MirroredSaveable = values._MirroredSaveable
CompositeTensor = composite_tensor.CompositeTensor

# --- Input ----------------------------------------------------------------------------------------------------
VariantDataset = dataset_ops._VariantDataset
dataset_from_graph = gen_experimental_dataset_ops.dataset_from_graph
auto_shard_dataset = gen_experimental_dataset_ops.auto_shard_dataset

# --- Keras -----------------------------------------------------------------------------------------------------
TensorFlowTrainer = keras_trainer.TensorFlowTrainer
KerasEpochIterator = keras_trainer.TFEpochIterator
KerasTensorFlowOptimizer: Any = keras.optimizers.Optimizer.__mro__[1]
KerasBaseOptimizer = BaseOptimizer
KerasLossModule: Any = keras_loss_module
KerasCompileLoss = compile_utils.CompileLoss
KerasRandom: Any = keras_random
KerasArrayDataAdapter = array_data_adapter.ArrayDataAdapter
keras_mask = keras_masking.get_keras_mask
set_keras_mask = keras_masking.set_keras_mask

_TESTED_TENSORFLOW = ((2, 20), (2, 22))
_TESTED_KERAS = ((3, 15), (3, 17))


def check_versions() -> None:
    """Warns once when TensorFlow or Keras is outside the range the private names were checked against.

    Runs on: every task, at the first strategy.
    """
    for name, version, (lowest, below) in (
        ("TensorFlow", tf.__version__, _TESTED_TENSORFLOW),
        ("Keras", keras.__version__, _TESTED_KERAS),
    ):
        major_minor = tuple(int(part) for part in version.split(".")[:2])
        if not lowest <= major_minor < below:
            warnings.warn(
                f"tfdist_ext was tested with {name} >= {lowest[0]}.{lowest[1]}, < {below[0]}.{below[1]}; "
                f"found {version}. Install a tested version if training misbehaves.",
                stacklevel=3,
            )


def current_stateless_scope():
    """Returns the `keras.StatelessScope` of this thread, or None."""
    return keras_global_state.get_global_attribute("stateless_scope")


def set_stateless_scope(scope) -> None:
    """Makes `scope` (or None) the `keras.StatelessScope` of this thread."""
    keras_global_state.set_global_attribute("stateless_scope", scope)


def all_local_devices() -> list[str]:
    """Returns the names of all logical GPUs of this process, or of its logical CPUs where there is none."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def serialized_graph(dataset) -> tf.Tensor:
    """Returns the scalar string tensor of the dataset's serialized GraphDef, random state ignored."""
    return dataset._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE)


def dataset_inputs(dataset) -> list:
    """Returns the datasets that `dataset` reads from."""
    return list(dataset._inputs())


def dataset_functions(dataset) -> list:
    """Returns the traced functions (objects with `.graph`) that `dataset` calls."""
    return [wrapped.function for wrapped in dataset._functions()]


def dataset_nodes(dataset) -> Iterator[Any]:
    """Yields a dataset and all that it reads from, each once."""
    pending, seen = [dataset], set()
    while pending:
        node = pending.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            pending.extend(dataset_inputs(node))


def is_unseeded_random(node_def) -> bool:
    """Returns True for an operation that draws random numbers without a seed."""
    return (
        "seed" in node_def.attr
        and "seed2" in node_def.attr
        and node_def.attr["seed"].i == node_def.attr["seed2"].i == 0
    )


# Where a dataset that a function makes has its two seeds among its inputs.
_SEED_INPUTS = {
    "ShuffleDatasetV3": 2,
    "ShuffleAndRepeatDatasetV2": 2,
    "RandomDataset": 0,
    "RandomDatasetV2": 0,
}


def _is_unseeded_dataset(op) -> bool:
    first = _SEED_INPUTS.get(op.type)
    return first is not None and all(tf.get_static_value(seed) == 0 for seed in op.inputs[first : first + 2])


def unseeded_steps(dataset) -> list[str]:
    """Returns the types of the steps of a pipeline that draw random numbers without a seed."""

    def draws(node) -> bool:
        seed = getattr(node, "_seed", None)
        if seed is not None and int(seed) == 0 and int(getattr(node, "_seed2", 0)) == 0:
            return True
        graphs = [function.graph for function in dataset_functions(node)]
        operations = [op for graph in graphs for op in graph.get_operations()]
        return any(is_unseeded_random(op.node_def) or _is_unseeded_dataset(op) for op in operations)

    return [dataset_type_name(node) for node in dataset_nodes(dataset) if draws(node)]


def steps_with_readers(dataset) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields each step of a pipeline with the types of the steps that it is read by, once for each way to it."""
    pending: list[tuple[Any, tuple[str, ...]]] = [(dataset, ())]
    while pending:
        node, readers = pending.pop()
        yield node, readers
        pending += [(source, (*readers, dataset_type_name(node))) for source in dataset_inputs(node)]


def differs_by_pass(node) -> bool:
    """Whether a step by itself does something else each time its dataset is opened."""
    if getattr(node, "_rerandomize", None):
        return True
    return getattr(node, "_seed", None) is not None and bool(
        getattr(node, "_reshuffle_each_iteration", False)
    )


def captures_datasets(node) -> bool:
    """Whether functions of a step refer to whole datasets, which nobody sees among its inputs."""
    return any(
        tensor.dtype == tf.variant
        for function in dataset_functions(node)
        for tensor in function.graph.external_captures
    )


def _remember_order_of_interleave() -> None:
    """Has a parallel interleave keep its `deterministic`, as a parallel map does."""
    kind = interleave_op._ParallelInterleaveDataset
    original = kind.__init__

    @functools.wraps(original)
    def initialize(self, *args, **kwargs):
        value = inspect.signature(original).bind(self, *args, **kwargs).arguments.get("deterministic")
        self._deterministic = "default" if value is None else str(bool(value)).lower()
        original(self, *args, **kwargs)

    kind.__init__ = initialize


_remember_order_of_interleave()


def ordered_options(serialized: bytes) -> bytes:
    """Returns serialized options of a dataset with `deterministic=True`, where they say otherwise."""
    options = dataset_options_pb2.Options.FromString(serialized)
    if options.WhichOneof("optional_deterministic") and not options.deterministic:
        options.deterministic = True
    return options.SerializeToString()


def unordered_steps(dataset) -> list[str]:
    """Returns the types of the steps, also of datasets that functions make, that may give elements in any order."""
    unordered = dataset.options().deterministic is False
    steps = []
    for node in dataset_nodes(dataset):
        own = getattr(node, "_deterministic", None)
        if own == "false" or (unordered and own == "default"):
            steps.append(dataset_type_name(node))
        for function in dataset_functions(node):
            definition = function.graph.as_graph_def(add_shapes=False)
            inner = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
            steps += [n.op for n in inner if n.attr["deterministic"].s == b"false" or n.attr["sloppy"].b]
    return steps


_STATEFUL_RANDOM = frozenset(
    {
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomGamma",
        "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "Multinomial", "ParameterizedTruncatedNormal",
    }
)  # fmt: skip


def stateful_random_operations(graph) -> list[str]:
    """Returns the names of random operations, also in called functions, whose state nobody can set or save."""
    names = [op.name for op in graph.get_operations() if op.type in _STATEFUL_RANDOM]
    for function in graph.as_graph_def(add_shapes=False).library.function:
        names += [node.name for node in function.node_def if node.op in _STATEFUL_RANDOM]
    return names


def dataset_variant(dataset) -> tf.Tensor:
    """Returns the variant tensor of a dataset."""
    return dataset._variant_tensor


def dataset_type_name(dataset) -> str:
    """Returns the class name of a dataset node, for instance `TFRecordDatasetV2`."""
    return type(dataset).__name__


def apply_loss_scaled(optimizer, gradients, variables) -> None:
    """Applies a `keras.optimizers.LossScaleOptimizer` outside a replica context.

    Its own `apply` insists on `merge_call`, which cannot be traced inside the `tf.cond` on finite gradients;
    the backend-neutral body does the same arithmetic.
    """
    optimizer._common_apply(gradients, variables)


def replace_keras_shuffles(shuffle_list, permutation_seed) -> None:
    """Lets `shuffle_list` and `permutation_seed` decide the order of PyDataset and NumPy input.

    Args:
        shuffle_list: Function of a list and of `random.shuffle`, in place of `random.shuffle(list)`.
        permutation_seed: Returns None to leave Keras alone, or a host function that draws two int64 seeds.
    """

    class _Random:
        """Stands in for the module `random` in Keras' PyDataset adapter."""

        def __getattr__(self, name):
            return getattr(random, name)

        def shuffle(self, values):
            shuffle_list(values, random.shuffle)

    py_dataset_adapter.random = _Random()
    original = KerasArrayDataAdapter.get_tf_dataset

    @functools.wraps(original)
    def get_tf_dataset(self):
        draw = permutation_seed()
        if draw is None or not self._shuffle or _global_seed_is_set():
            return original(self)
        stock = tf.random.shuffle

        def agreed_shuffle(value, seed=None, name=None):
            seeds = tf.numpy_function(draw, [], tf.int64)
            seeds.set_shape([2])
            return tf.random.experimental.stateless_shuffle(value, seeds)

        tf.random.shuffle = agreed_shuffle
        try:
            return original(self)
        finally:
            tf.random.shuffle = stock

    KerasArrayDataAdapter.get_tf_dataset = get_tf_dataset


def global_seed() -> int | None:
    """Returns the number given to `tf.random.set_seed`, or None."""
    return eager_context.global_seed()


def _global_seed_is_set() -> bool:
    return global_seed() is not None


def convert_user_function(function):
    """Applies AutoGraph to a replica function as `tf.distribute.Strategy.run` would."""
    return autograph.tf_convert(function, autograph_ctx.control_status_ctx(), convert_by_default=False)


def clone_function(function, python_function):
    """Returns a tf.function of another Python function with the options of `function`."""
    return function._clone(python_function=python_function)


def publish(key: str, value: str) -> None:
    """Stores a string in TensorFlow's coordination service."""
    eager_context.context().set_config_key_value(key, value)


def read_published(key: str) -> str:
    """Returns a string of TensorFlow's coordination service; waits until it is there, 60 s at most."""
    return eager_context.context().get_config_key_value(key, timeout_in_ms=60_000)


def strategies_of_optimizer(optimizer) -> list:
    """Returns the strategies in whose scopes a Keras optimizer, and the one it wraps, were made."""
    parts = [optimizer, getattr(optimizer, "inner_optimizer", None)]
    return [part._distribution_strategy for part in parts if hasattr(part, "_distribution_strategy")]


def strategies_of_variables(variables) -> list:
    """Returns the strategy of each Keras variable, None for one of no strategy."""
    return [getattr(variable._value, "_distribute_strategy", None) for variable in variables]


# --- Parameter servers: remote functions on the tasks of a cluster ------------------------------------------------
_REMOTE = re.compile("/job:(ps|worker)/")


def connect_to_cluster(cluster_spec, protocol: str, filters: dict[str, list[str]]) -> None:
    """Connects this process, the chief, to its workers and parameter servers.

    Args:
        cluster_spec: `tf.train.ClusterSpec`.
        protocol: For instance "grpc".
        filters: For each job the job prefixes that its tasks may see.
    """
    device_filters = tf.config.experimental.ClusterDeviceFilters()
    for job, visible in filters.items():
        for index in range(cluster_spec.num_tasks(job)):
            device_filters.set_device_filters(job, index, visible)
    eager_remote.connect_to_cluster(
        cluster_spec, job_name="chief", protocol=protocol, cluster_device_filters=device_filters
    )
    eager_context.set_server_def_retries(3)
    eager_context.ensure_initialized()
    _let_threads_run_while_functions_are_sent()
    _let_threads_run_while_constants_are_sent()


# TensorFlow waits for the answers of the tasks to which it sends something. In two places it holds the interpreter's
# lock meanwhile, so that beside one stopped task no thread of Python runs, not even the one that cuts its connections.
def _let_threads_run_while_functions_are_sent() -> None:
    """Sends new functions to the tasks, and has them forget old ones, without the interpreter's lock."""
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))
        add, remove = library.TFE_ContextAddFunction, library.TFE_ContextRemoveFunction
    except (OSError, AttributeError):
        return  # Another build of TensorFlow, which is taken as it is.
    library.TF_NewStatus.restype, library.TF_Message.restype = ctypes.c_void_p, ctypes.c_char_p
    context = eager_context.context()

    def call(function, argument) -> None:
        status = ctypes.c_void_p(library.TF_NewStatus())
        try:
            function(_address_in_capsule(context._handle), argument, status)
            if code := library.TF_GetCode(status):
                message = library.TF_Message(status).decode(errors="replace")
                raise tf.compat.v1.errors.exception_type_from_error_code(code)(None, None, message)
        finally:
            library.TF_DeleteStatus(status)

    def add_c_function(c_func) -> None:
        # pybind11 keeps the address of its C++ object right after the header of the Python object.
        call(add, ctypes.c_void_p.from_address(id(c_func) + object.__basicsize__))

    context.add_c_function = add_c_function
    context.remove_function = lambda name: call(remove, tf.compat.as_bytes(name))
    # When the interpreter has ended there is no thread that could cut connections, and nobody to forget for.
    atexit.register(setattr, context, "remove_function", lambda name: None)


def _let_threads_run_while_constants_are_sent() -> None:
    """Makes each constant of a task here, and sends it by an operation, which gives the interpreter's lock away."""
    make = constant_op.convert_to_eager_tensor

    def convert_to_eager_tensor(value, ctx, dtype=None):
        if isinstance(value, tf.Tensor) or not _REMOTE.match(ctx.device_name or ""):
            return make(value, ctx, dtype)
        with tf.device(None):
            here = make(value, ctx, dtype)
        return tf.raw_ops.Identity(input=here)

    constant_op.convert_to_eager_tensor = convert_to_eager_tensor


def _address_in_capsule(capsule) -> ctypes.c_void_p:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.argtypes, api.PyCapsule_GetName.restype = [ctypes.py_object], ctypes.c_char_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    return ctypes.c_void_p(api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule)))


def whole_server_def():
    """Returns a copy of the description of the cluster this process is connected to."""
    server_def = eager_context.get_server_def()
    copy = type(server_def)()
    copy.CopyFrom(server_def)
    return copy


def update_cluster(server_def, absent: dict[str, set[int]]) -> None:
    """Connects to the tasks of `server_def` that are there, dropping the absent ones.

    TensorFlow waits, with a lock on its caches, for what the executor that threads share has begun, for instance for a
    worker to delete a tensor; whoever makes a constant meanwhile waits for the caches with the interpreter's lock. So
    that is waited for before, without either lock.

    Args:
        server_def: What `whole_server_def` returned after connecting.
        absent: For each job the indices of tasks that are not there now.
    """
    present = type(server_def)()
    present.CopyFrom(server_def)
    for job in present.cluster.job:
        for index in absent.get(job.name, ()):
            job.tasks.pop(index, None)
    shared = eager_context.context().executor
    with contextlib.suppress(tf.errors.OpError):
        shared.wait()
    shared.clear_error()
    with own_executor():
        eager_context.context().update_server_def(present)


def is_context_initialized() -> bool:
    """Returns True once the process has run a TensorFlow operation."""
    return eager_context.context()._initialized


def synchronous_executor():
    """Returns an executor whose remote calls block the calling thread, and no other."""
    return eager_executor.new_executor(enable_async=False)


def executing_on(executor):
    """Returns a context in which this thread's operations go through `executor`."""
    return eager_context.executor_scope(executor)


def is_default_callback(method) -> bool:
    """Returns True for a method of a Keras callback that nobody has overridden."""
    return keras_python_utils.is_default(method)


def forget_error() -> None:
    """Clears the error of this thread's executor, which the next operations would fail with otherwise."""
    eager_context.context().executor.clear_error()


def record_read(variable, value) -> None:
    """Tells the active gradient tapes that `value` is what reading `variable` gave.

    Args:
        variable: `tf.Variable`, or a `ShardedVariable`, whose first shard then stands for it.
        value: Tensor that was not computed from the variable in this graph.
    """
    source = variable.variables[0] if isinstance(variable, ShardedVariable) else variable
    gradient_tape.variable_accessed(source)
    tape_record.record_operation("ReadVariableOp", [value], [source.handle], lambda gradient: [gradient])


def record_row_read(variable, rows, to_gradient) -> None:
    """Like `record_read`, for rows: `to_gradient` turns the gradient of the rows into that of the variable."""
    source = variable.variables[0] if isinstance(variable, ShardedVariable) else variable
    gradient_tape.variable_accessed(source)
    tape_record.record_operation(
        "ReadVariableOp", [rows], [source.handle], lambda gradient: [to_gradient(gradient)]
    )


def no_recording():
    """Returns a context in which gradient tapes record nothing."""
    return tape_record.stop_recording()


def let_keras_variables_be_sharded() -> None:
    """Teaches Keras variables and optimizers that a value may be a `ShardedVariable`."""

    def handle(self):
        value = self._value
        return value.variables[0].handle if isinstance(value, ShardedVariable) else value.handle

    keras.Variable.handle = property(handle)
    original_key = KerasTensorFlowOptimizer._var_key

    def var_key(self, variable):
        value = variable._value if isinstance(variable, keras.Variable) else variable
        return (
            value.variables[0]._unique_id
            if isinstance(value, ShardedVariable)
            else original_key(self, variable)
        )

    KerasTensorFlowOptimizer._var_key = var_key
    original_array = keras.Variable.__array__

    def array(self, dtype=None, copy=None):
        if isinstance(self._value, ShardedVariable):
            return self._value.numpy() if dtype is None else self._value.numpy().astype(dtype)
        return original_array(self, dtype)

    keras.Variable.__array__ = array
    overwrite = KerasTensorFlowOptimizer._overwrite_model_variables_with_average_value

    def overwrite_with_average(self, trainable_variables):
        average_of = dict(
            zip(map(id, self._trainable_variables), self._model_variables_moving_average, strict=True)
        )
        sharded = [v for v in trainable_variables if isinstance(getattr(v, "_value", None), ShardedVariable)]
        if not sharded:
            overwrite(self, trainable_variables)
            return
        for variable in trainable_variables:
            variable.assign(average_of[id(variable)])

    KerasTensorFlowOptimizer._overwrite_model_variables_with_average_value = overwrite_with_average
    serialize, restore = keras.Variable._serialize_to_tensors, keras.Variable._restore_from_tensors

    def serialize_to_tensors(self):
        if isinstance(self._value, ShardedVariable):
            whole = self._value
            # Read when it is saved, and not when somebody asks what there is.
            read = tensor_callable.Callable(lambda: tf.convert_to_tensor(whole), whole.dtype, "/device:CPU:0")
            return {"VARIABLE_VALUE": read}
        return serialize(self)

    def restore_from_tensors(self, restored):
        if isinstance(self._value, ShardedVariable):
            self._value.assign(restored["VARIABLE_VALUE"])
            return self._value
        return restore(self, restored)

    keras.Variable._serialize_to_tensors = serialize_to_tensors
    keras.Variable._restore_from_tensors = restore_from_tensors


# --- Calls into a serving process: one task runs a function of another -----------------------------------------
def register_python_function(token: str, function: Callable) -> None:
    """Lets `tf.raw_ops.PyFunc(token=token)` on a device of this process call `function` of NumPy values.

    `tf.numpy_function` draws tokens that no other process can know. TensorFlow keeps a weak reference only: the
    caller must hold the function.
    """
    script_ops._py_funcs._funcs[token] = function


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """Runs the eager ops of this thread apart from those of other threads.

    In the executor that threads share by default, the error of a dead task surfaces in calls to tasks that live.
    """
    executor = eager_executor.new_executor(enable_async=False)
    try:
        with eager_context.executor_scope(executor):
            yield
    finally:
        # An executor that is deleted with an error prints it.
        executor.clear_error()


def optimizer_key(optimizer, variable):
    """Returns the key under which an optimizer keeps the slots of a Keras variable, also inside a stateless scope."""
    value = variable._value
    return value.variables[0]._unique_id if isinstance(value, ShardedVariable) else optimizer._var_key(value)


# --- Checkpoints -------------------------------------------------------------------------------------------------
TrackableObjectGraph = trackable_object_graph_pb2.TrackableObjectGraph
OBJECT_GRAPH_KEY = trackable_base.OBJECT_GRAPH_PROTO_KEY
Trackable = trackable_base.Trackable


def object_graph(root) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """Lists what a `tf.train.Checkpoint` would save, reading no value.

    Args:
        root: Trackable object.

    Returns:
        Dictionary from checkpoint key to `(trackable, value)`, for `read_for_saving`, and the `TrackableObjectGraph`.
    """
    serialized, _, registered, proto = save_util.serialize_graph_view(graph_view.ObjectGraphView(root))
    if registered:
        raise ValueError(
            f"Objects with a registered saver cannot be checkpointed here: {sorted(registered)}."
        )
    values = {}
    for trackable, tensors in serialized.items():
        for key, value in tensors.items():
            values[key] = (trackable, value)
    return values, proto


def read_for_saving(trackable, value) -> dict[str, tf.Tensor]:
    """Reads one value that `object_graph` listed, copying none that is on a CPU.

    Returns:
        Dictionary from slice specification ("" for a whole tensor) to the tensor.
    """
    parts = value if isinstance(value, dict) else {"": value}
    return {spec.strip(): _read_one(part) for spec, part in parts.items()}


def _read_one(value) -> tf.Tensor:
    if isinstance(value, saveable_object.SaveSpec):
        value = value.tensor
    elif callable(value):
        value = value()
    if value is None:
        raise ValueError("A variable is not initialized, so that it cannot be saved.")
    return tf.convert_to_tensor(value)


def holds_parts(trackable) -> bool:
    """Whether an object that `object_graph` listed is a variable whose replicas hold parts of its value."""
    # By classes and `vars`: asking a distributed variable for an attribute that it lacks reads it, over all workers.
    owner = trackable.obj if hasattr(type(trackable), "obj") else trackable
    variable = vars(owner).get("_value") if isinstance(owner, keras.Variable) else owner
    return isinstance(variable, SyncOnReadVariable) and bool(vars(variable).get("holds_parts", False))


def stored_variables(trackable) -> dict[str, tf.Variable]:
    """Returns the plain variables that hold the value of an object that `object_graph` listed, by slice specification.

    Returns:
        One of "" for a whole variable, the shards of a `ShardedVariable`, nothing for other objects.
    """
    owner = getattr(trackable, "obj", trackable)  # TensorFlow wraps what has a saver of the older kind.
    value = getattr(owner, "_value", owner)
    if isinstance(value, ShardedVariable):
        shape, offset, parts = value.shape.as_list(), [0] * len(value.shape), {}
        for shard in value.variables:
            parts[tf.Variable.SaveSliceInfo("", shape, offset, shard.shape.as_list()).spec.strip()] = shard
            offset = [offset[0] + shard.shape[0], *offset[1:]]
        return parts
    return {"": value} if isinstance(value, tf.Variable) else {}


def restore_from_values(trackable, values: dict[str, tf.Tensor]) -> None:
    """Gives an object the values that belong to its checkpoint keys."""
    if isinstance(trackable, tf.train.experimental.PythonState):
        (value,) = values.values()
        trackable.deserialize(value.numpy())
        return
    trackable._restore_from_tensors(
        {key.rpartition("/.ATTRIBUTES/")[2]: value for key, value in values.items()}
    )


@contextlib.contextmanager
def keeping_values(root) -> Iterator[None]:
    """Gives the variables below a trackable object that are no Keras variables the values back that they have now."""
    objects, _ = graph_view.ObjectGraphView(root).breadth_first_traversal()
    of_keras = {id(item._value) for item in objects if isinstance(item, keras.Variable)}
    plain = [
        item
        for item in objects
        if isinstance(item, (tf.Variable, DistributedVariable)) and id(item) not in of_keras
    ]
    before = [variable.numpy() for variable in plain]
    try:
        yield
    finally:
        for variable, value in zip(plain, before, strict=True):
            if not np.array_equal(variable.numpy(), value):
                variable.assign(value)


def num_workers(strategy) -> int:
    """Returns the number of workers of a stock multi-worker strategy."""
    return strategy.extended._num_workers


def global_generator():
    """Returns the `tf.random.Generator` of the process, or None where nobody has asked for one."""
    return stateful_random_ops.global_generator


def keras_global_seed_generator():
    """Returns the generator that Keras draws from where no seed is given, or None where nobody has drawn."""
    return keras_global_state.get_global_attribute("global_seed_generator")


def operation_seeds():
    """Returns the `random.Random` that seeds operations after `tf.random.set_seed`, or None without a seed."""
    context = eager_context.context()
    return getattr(context, "_rng", None) if context._seed is not None else None


def concrete_graphs(function, depth: int = 4) -> list:
    """Returns the graphs that a tf.function, or those that a Python function has in its closure, were traced to."""
    if hasattr(function, "_list_all_concrete_functions"):
        return [concrete.graph for concrete in function._list_all_concrete_functions()]
    cells = getattr(function, "__closure__", None) or ()
    if not depth:
        return []
    return [graph for cell in cells for graph in concrete_graphs(cell.cell_contents, depth - 1)]


def is_built(model) -> bool:
    """Returns True where a Keras model has all the variables that a compiled model gets in its first step."""
    parts = [model._compile_metrics, model._compile_loss, model.optimizer] if model.compiled else []
    layers = list(model._flatten_layers())
    return all(part.built for part in [*layers, *parts] if part is not None)


def build_from_batch(model, symbolic_batch) -> None:
    """Makes the variables that `is_built` misses.

    Args:
        model: Keras model.
        symbolic_batch: Structure of `KerasTensor`, as of a batch of its dataset.
    """
    if getattr(model, "_distribute_strategy", None) is None:
        model._symbolic_build(data_batch=symbolic_batch)
    else:
        model._maybe_symbolic_build(data_batch=symbolic_batch)


def set_first_epoch(model, epoch: int) -> None:
    """Tells a `fit` that has begun, from `on_train_begin`, at which epoch to start; 0 leaves it to the user."""
    model._initial_epoch = epoch


def call_around_callbacks(event: str, *, before: str | None = None, after: str) -> None:
    """Has Keras call two methods of callbacks, where they have them, with `(all callbacks, *arguments)`.

    Args:
        event: A method of `CallbackList`.
        before: Called before any callback has had its `event`.
        after: Called once every callback has had it.
    """
    original = getattr(keras.callbacks.CallbackList, event)

    def call(self, method, args):
        for callback in self.callbacks:
            if hasattr(callback, method):
                getattr(callback, method)(list(self.callbacks), *args)

    @functools.wraps(original)
    def call_all(self, *args, **kwargs):
        if before is not None:
            call(self, before, args)
        original(self, *args, **kwargs)
        call(self, after, args)

    setattr(keras.callbacks.CallbackList, event, call_all)


def show_metrics_without_steps(model) -> Callable[[], None]:
    """Has `fit` take the logs of an epoch without steps from the metrics, until the function returned is called."""
    original = model._get_metrics_result_or_logs
    model._get_metrics_result_or_logs = lambda logs: original(logs or model.get_metrics_result())

    def undo() -> None:
        model.__dict__.pop("_get_metrics_result_or_logs", None)

    return undo


def watch_epochs(opener, reading_of) -> None:
    """Lets checkpoints know what Keras' loops read.

    Args:
        opener: Function of Keras' iterator over epochs and of the position of its dataset (the attribute
            `tfdist_position` of what `fit` was given); returns what Keras calls `iter` on.
        reading_of: Function of the position that returns who enumerates the steps, or None.
    """
    kind = KerasEpochIterator
    initialize, iterate, get_iterator = kind.__init__, kind.__iter__, kind._get_iterator

    @functools.wraps(initialize)
    def initialize_plain(self, *args, **kwargs):
        self._tfdist_position = getattr(kwargs.get("x"), "tfdist_position", None)
        if self._tfdist_position is not None:
            kwargs["x"] = self._tfdist_position.plain
        initialize(self, *args, **kwargs)

    @functools.wraps(iterate)
    def iterate_watched(self):
        reading = None if self._tfdist_position is None else reading_of(self._tfdist_position)
        if reading is None:
            return iterate(self)
        self._epoch_iterator = reading.enumerate(self, lambda epochs: epochs._enumerate_iterator())
        return self

    @functools.wraps(get_iterator)
    def get_watched(self):
        position = self._tfdist_position
        return get_iterator(self) if position is None else opener(self, position)

    kind.__init__, kind.__iter__, kind._get_iterator = initialize_plain, iterate_watched, get_watched


# --- Graphs of traced functions ------------------------------------------------------------------------------------
def function_graph(graph, name: str):
    """Returns the FuncGraph of a function that a graph calls by name, or None where only the runtime has it."""
    return getattr(graph._get_function(name), "graph", None)


def is_compiled(op) -> bool:
    """Returns True for a call of a function with `jit_compile=True`."""
    return op.node_def.attr["_XlaMustCompile"].b if "_XlaMustCompile" in op.node_def.attr else False


def is_compiled_function(concrete) -> bool:
    """Returns True for a ConcreteFunction of a function with `jit_compile=True`; False for a FuncGraph."""
    attributes = concrete.function_def.attr if hasattr(concrete, "function_def") else {}
    # Looking up what is not there would add it to the function.
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def let_slurm_have_no_gpus(resolver) -> None:
    """Mends a `SlurmClusterResolver` of hosts without GPUs, which counts tasks in steps of their GPUs, here none."""
    if (
        isinstance(resolver, tf.distribute.cluster_resolver.SlurmClusterResolver)
        and not resolver._gpus_per_task
    ):
        resolver._gpus_per_task, resolver._auto_set_gpu = 1, False
        resolver._gpus_per_node = max(resolver._task_configuration.values())


def registered_flops(op) -> float | None:
    """Returns TensorFlow's count of an operation's floating-point operations, or None where it has none."""
    try:
        with deprecation.silence():
            return ops.get_stats_for_node_def(op.graph, op.node_def, "flops").value
    except (ValueError, TypeError):
        return None


def local_task() -> tuple[str, int] | None:
    """Returns type and index of this process' task in the cluster it is connected to, or None."""
    server = eager_context.context().get_server_def()
    return None if server is None else (server.job_name, server.task_index)


@contextlib.contextmanager
def collected_graphs() -> Iterator[list]:
    """Collects the graphs of functions that run first meanwhile, as TensorFlow's placer leaves them.

    Grappler is off meanwhile: it would rename and fold operations.

    Yields:
        A list that is filled at the end: for each function the nodes of its partitions.
    """
    context = eager_context.context()
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    context.enable_graph_collection()
    found: list[list] = []
    try:
        yield found
        collected = context.export_run_metadata()
        found += [
            [node for part in function.partition_graphs for node in part.node]
            for function in collected.function_graphs
        ]
    finally:
        context.disable_graph_collection()
        tf.config.optimizer.set_experimental_options(before)


def flatten_with_path(structure) -> list[tuple[tuple, Any]]:
    """Returns the path and the value of each part of a nested structure; tensors of several parts stay whole."""
    return nest.flatten_with_tuple_paths(structure)


def traced_signatures(function) -> list[tuple]:
    """Returns (args, kwargs) as specs of each trace of a tf.function, the oldest first."""
    return [concrete.structured_input_signature for concrete in function._list_all_concrete_functions()]


_making = threading.local()
_make_function_context = function_context.make_function_context
_finish_operation = ops.Graph._create_op_helper


def _make_unique_function_context(*args, **kwargs):
    made = _make_function_context(*args, **kwargs)
    key = object() if getattr(_making, "deciders", ()) else getattr(_making, "outer_trace", None)
    if key is None:
        return made
    unique = made.context._replace(device_functions=(*made.context.device_functions, key))
    return type(made)(unique, made.scope_type)


@contextlib.contextmanager
def tracing_inner_functions_anew() -> Iterator[None]:
    """Has each `tf.function` that this thread calls meanwhile traced anew, once.

    What a `keras.StatelessScope` shows in place of variables are tensors of the graph that is being traced, which an
    inner function captures; TensorFlow would take the trace that it has, of another graph.
    """
    function_context.make_function_context = _make_unique_function_context
    before = getattr(_making, "outer_trace", None)
    _making.outer_trace = object()
    try:
        yield
    finally:
        _making.outer_trace = before


def _finish_operation_on_device(self, op, *args, **kwargs):
    _finish_operation(self, op, *args, **kwargs)
    for device_of in reversed(getattr(_making, "deciders", ())):
        device = device_of(op)
        if device:
            op._set_device_from_string(device)


@contextlib.contextmanager
def devices_of_new_operations(device_of) -> Iterator[None]:
    """Has a function choose the device of each operation that this thread adds to any graph meanwhile.

    It has the last word, but for those of blocks around this one, which see what it chose. What is given to
    `tf.compat.v1.device` has not: the gradient of an inner function is made under `tf.device(None)`. Inner functions
    are traced anew at each call; TensorFlow would take the trace that there is, whatever devices are asked for.

    Args:
        device_of: Function of the operation; returns a device, or None to leave it as it is.
    """
    function_context.make_function_context = _make_unique_function_context
    ops.Graph._create_op_helper = _finish_operation_on_device
    before = getattr(_making, "deciders", ())
    _making.deciders = (*before, device_of)
    try:
        yield
    finally:
        _making.deciders = before


_new_layers = threading.local()
_make_layer = keras.layers.Layer.__new__


def _make_watched_layer(cls, *args, **kwargs):
    layer = _make_layer(cls, *args, **kwargs)
    found = getattr(_new_layers, "found", None)
    if found is not None:
        found.append(layer)
    return layer


@contextlib.contextmanager
def new_keras_layers() -> Iterator[list]:
    """Lists the Keras layers that this thread makes meanwhile, those of an inner block apart.

    Yields:
        The layers, some of them before their constructor has run.
    """
    keras.layers.Layer.__new__ = _make_watched_layer
    before = getattr(_new_layers, "found", None)
    found: list = []
    _new_layers.found = found
    try:
        yield found
    finally:
        _new_layers.found = before
