"""How is a program written out as a script that stands alone?"""

from tests.fuzz import parts
from tests.fuzz.definitions import DEFINITIONS, STEPS

_HEAD = '''"""{title}"""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist_ext

'''

_RUN = '''
def arrays(rows, seed, noise):
    generator = np.random.default_rng(seed)
    first = generator.normal(size=(rows, 4)) * (1 + noise * generator.normal(size=(rows, 4)))
    {x}
    {y}
    {weights}
    return {{{returned}}}


def run(strategy, batch_size, step_rows, noise=0.0):
    """Trains on batches of `step_rows` rows, evaluates on batches of `batch_size`."""
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(11)
    folder = tempfile.mkdtemp()
    evaluated, predicted, seen = [], [], []
    training_arrays, evaluation_arrays = arrays({rows}, 1, noise), arrays(5, 2, noise)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model()
    {actions}
    return {{
        "weights": model.get_weights(),
        "optimizer": [variable.numpy() for variable in model.optimizer.variables],
        "histories": histories,
        "evaluated": evaluated,
        "predicted": predicted,
        "seen": seen,
    }}
'''

_MAIN = """

if __name__ == "__main__":
    {strategy}
    alone, distributed = run(None, {batch_size}, {step_rows}), run(strategy, {batch_size}, {batch_size})
    flat = [keras.tree.flatten(one) for one in (distributed, alone)]
    for name in alone:
        print(name, "\\n  distributed", distributed[name], "\\n  one device ", alone[name])
    assert len(flat[0]) == len(flat[1])
    print("largest difference", max(np.max(np.abs(np.subtract(a, b)), initial=0.0) for a, b in zip(*flat)))
"""

_STRATEGIES = {
    "mirrored": (
        'tf.config.set_logical_device_configuration(\n        tf.config.list_physical_devices("CPU")[0], '
        "[tf.config.LogicalDeviceConfiguration()] * {replicas}\n    )\n    "
        'strategy = tfdist_ext.MirroredStrategy([f"CPU:{{i}}" for i in range({replicas})])'
    ),
    "workers": "strategy = tfdist_ext.MultiWorkerMirroredStrategy()  # tfdist-ext run --workers {replicas} -- ...",
    "servers": (
        "cluster = tfdist_ext.cluster.in_process(num_workers={replicas}, num_ps={servers})\n    "
        "strategy = tfdist_ext.ParameterServerStrategy(cluster, update_policy=tfdist_ext.{policy})"
    ),
}


def script_of(program, title="A program that differs from one device."):
    """Returns the whole script."""
    strategy = _STRATEGIES[program.strategy].format(
        replicas=program.replicas, servers=program.servers, policy=program.policy
    )
    main = _MAIN.format(
        strategy=strategy,
        batch_size=program.batch_size,
        step_rows=program.batch_size * program.batches_in_a_step,
    )
    return _HEAD.format(title=title) + functions_of(program) + main


def functions_of(program):
    """Returns `run` and what it needs, without the part that makes a strategy."""
    model = _model(program)
    run = _RUN.format(rows=program.rows, actions=_actions(program), **_data(program))
    step = STEPS.get(program.step, "")
    used = [text for name, text in DEFINITIONS.items() if name in model + run + step]
    return "\n".join([*used, step, model, run])


def _model(program):
    lines, given = _inputs(program.inputs, program.rows)
    lines += [parts.LAYERS[name] for name in program.layers]
    width, activation = parts.HEADS[program.target]
    head = 'keras.layers.Dense({}, activation="{}", name="{}")(x)'
    if program.outputs == "one":
        lines.append("outputs = " + head.format(width, activation, "a"))
    else:
        first, second = head.format(width, activation, "a"), head.format(2, "sigmoid", "b")
        form = "[{}, {}]" if program.outputs == "list" else '{{"a": {}, "b": {}}}'
        lines.append("outputs = " + form.format(first, second))
    kind = "OwnModel" if program.step else "keras.Model"
    lines += [f"model = {kind}({given}, outputs)", _compile(program), "return model"]
    return "\n\ndef make_model():\n    " + "\n    ".join(lines) + "\n"


def _inputs(kind, rows):
    if kind == "array":
        return ["inputs = x = keras.Input((4,))"], "inputs"
    if kind in ("ids", "repeated ids"):
        vocabulary = max(rows, 5)
        lines = ['inputs = keras.Input((1,), dtype="int32")']
        lines.append(f"x = keras.layers.Flatten()(keras.layers.Embedding({vocabulary}, 3)(inputs))")
        return lines, "inputs"
    lines = ['a, b = keras.Input((4,), name="u"), keras.Input((4,), name="v")']
    lines.append("x = keras.layers.Concatenate()([a, b])")
    return lines, '{"u": a, "v": b}' if kind == "dict" else "(a, b)"


def _compile(program):
    rate = f"learning_rate={program.rate}"
    optimizer = f"keras.optimizers.{program.optimizer}({', '.join([rate, *program.options])})"
    if program.loss_scale:
        optimizer = (
            f"keras.optimizers.LossScaleOptimizer({optimizer}, initial_scale=8.0, dynamic_growth_steps=2)"
        )
    arguments = [f"optimizer={optimizer}"]

    def for_outputs(first, second):
        if program.outputs == "one":
            return first
        return f"[{first}, {second}]" if program.outputs == "list" else f'{{"a": {first}, "b": {second}}}'

    arguments.append("loss=" + for_outputs(program.loss, program.second_loss))
    if program.loss_weights and program.outputs != "one":
        arguments.append("loss_weights=" + for_outputs(*program.loss_weights))
    for name in ("metrics", "weighted_metrics"):
        if getattr(program, name):
            metrics = f"[{', '.join(getattr(program, name))}]"
            arguments.append(f"{name}=" + for_outputs(metrics, '["mae"]'))
    if program.steps_per_execution > 1:
        arguments.append(f"steps_per_execution={program.steps_per_execution}")
    return "model.compile(\n        " + ",\n        ".join(arguments) + ",\n    )"


def _data(program):
    x = {
        "array": "x = first",
        "ids": 'x = np.arange(rows, dtype="int32")[::-1, None]',
        "repeated ids": "x = generator.integers(0, 3, size=(rows, 1))",
        "tuple": "x = (first, first[:, ::-1] * 0.5)",
        "dict": 'x = {"u": first, "v": first[:, ::-1] * 0.5}',
    }[program.inputs]
    y = {
        "values": "y = 1 / (1 + np.exp(generator.normal(size=(rows, 2))))",
        "labels": "y = generator.integers(0, 3, size=(rows, 1))",
        "one-hot": "y = np.eye(3)[generator.integers(0, 3, size=rows)]",
    }[program.target]
    weights = {
        "": "pass",
        "positive": "weights = generator.uniform(0.5, 2.0, size=rows)",
        "zeros": "weights = generator.uniform(0.5, 2.0, size=rows) * (np.arange(rows) % 5 < 2)",
    }[program.sample_weight]
    targets, sample_weights = "y", "weights"
    if program.outputs == "list":
        targets, sample_weights = "(y, abs(np.tanh(first[:, :2])))", "(weights, weights[::-1].copy())"
    if program.outputs == "dict":
        targets = '{"a": y, "b": abs(np.tanh(first[:, :2]))}'
        sample_weights = '{"a": weights, "b": weights[::-1].copy()}'
    returned = f'"x": x, "y": {targets}'
    if program.sample_weight:
        returned += f', "sample_weight": {sample_weights}'
    return {"x": x, "y": y, "weights": weights, "returned": returned}


def _training(program):
    """Returns the first arguments of `fit`."""
    repeat = ".repeat()" if program.steps_per_epoch else ""
    sliced = "tf.data.Dataset.from_tensor_slices(tuple(training_arrays.values()))"
    if program.input == "arrays":
        return f"**training_arrays, batch_size=step_rows, shuffle={program.shuffle}"
    if program.input == "sequence":
        return "Rows(tuple(training_arrays.values()), step_rows), shuffle=False"
    if program.input == "python generator":
        rows = "Rows(tuple(training_arrays.values()), step_rows)"
        return f"({rows}[i % len({rows})] for i in range(10**6))"
    if program.input == "generator":
        return (
            f"tf.data.Dataset.from_generator(lambda: iter({sliced}),\n"
            f"        output_signature={sliced}.element_spec\n"
            "    # On one device Keras counts the end of a dataset of unknown length as a step of the optimizer.\n"
            f"    ).apply(lambda rows: rows if strategy else rows.apply(tf.data.experimental.assert_cardinality(\n"
            f"        {program.rows}))).batch(step_rows){repeat}"
        )
    return f"{sliced}.batch(step_rows){repeat}"


def _fit(program):
    arguments = [_training(program), f"epochs={program.epochs}", "verbose=0"]
    if program.steps_per_epoch:
        arguments.append(f"steps_per_epoch={program.steps_per_epoch}")
    if program.class_weight:
        arguments.append("class_weight={0: 0.5, 1: 1.0, 2: 3.0}")
    if program.validation == "arrays":
        arguments.append(
            "validation_data=tuple(evaluation_arrays.values()), validation_batch_size=batch_size"
        )
    elif program.validation == "dataset":
        arguments.append(
            "validation_data=tf.data.Dataset.from_tensor_slices(tuple(evaluation_arrays.values())).batch(batch_size)"
        )
    elif program.validation == "split":
        arguments.append("validation_split=0.4, validation_batch_size=batch_size")
    if program.callbacks:
        listed = ",\n        ".join(parts.CALLBACKS[name] for name in program.callbacks)
        arguments.append(f"callbacks=[{listed}]")
    return "model.fit(\n        " + ",\n        ".join(arguments) + ",\n    ).history"


def _actions(program):
    lines = []
    evaluate = (
        "evaluated.append(model.evaluate(\n"
        "        **evaluation_arrays, batch_size=batch_size, verbose=0, return_dict=True))"
    )
    predict = 'predicted.append(model.predict(evaluation_arrays["x"], batch_size=batch_size, verbose=0))'
    if program.before == "train_on_batch":
        lines.append("seen.append(model.train_on_batch(**arrays(batch_size, 3, noise), return_dict=True))")
    elif program.before == "evaluate":
        lines.append(evaluate)
    elif program.before == "predict":
        lines.append(predict)
    lines.append(f"histories = [{_fit(program)}]")
    if program.after == "compile":
        lines.append("with strategy.scope() if strategy else contextlib.nullcontext():")
        lines.append('    model.compile(keras.optimizers.Adam(0.05), "mse")')
    if program.after:
        lines.append(f"histories.append({_fit(program)})")
    lines += {"": [], "evaluate": [evaluate], "predict": [predict]}[program.end]
    return "\n    ".join(lines)
