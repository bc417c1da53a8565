"""Which programs are drawn? Each choice begins with the simplest, to which hypothesis shrinks."""

from hypothesis import strategies as st

from tests.fuzz import parts
from tests.fuzz.programs import Program

_SEQUENTIAL = "BoundedStaleness(0)"


def _some(choices, most):
    """Draws few of many, without repetition."""
    return st.lists(st.sampled_from(list(choices)), max_size=most, unique=True).map(tuple)


@st.composite
def programs(draw, strategies=("mirrored", "servers", "workers")):
    """Draws a program.

    Args:
        draw: Given by hypothesis.
        strategies: Which strategies there are.
    """
    fields = _layout(draw, strategies) | _model(draw)
    fields |= _loss(draw, fields) | _optimizer(draw) | _input(draw, fields)
    names = list(parts.CALLBACKS)
    if fields["strategy"] == "servers" and fields["policy"] != _SEQUENTIAL:
        names = [name for name in names if name not in parts.SEE_BATCHES]
    if not any(option.startswith("use_ema") for option in fields["options"]):
        names.remove("swaps averages")
    if "schedules" in fields["rate"]:
        # Keras refuses to set the rate.
        names = [name for name in names if name not in ("schedule", "plateau")]
    fields["callbacks"] = draw(_some(names, 2))
    fields["before"] = draw(st.sampled_from(["", "", "", "train_on_batch", "evaluate", "predict"]))
    fields["after"] = draw(st.sampled_from(["", "", "", "fit", "compile"]))
    fields["end"] = draw(st.sampled_from(["", "evaluate", "predict"]))
    return Program(**fields)


def _layout(draw, strategies):
    strategy = draw(st.sampled_from(list(strategies)))
    # As many draws for each strategy: only then can one be replaced by another when a program is shrunk.
    replicas, servers = draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2]))
    policy = draw(st.sampled_from([_SEQUENTIAL, "Synchronous()"]))
    if strategy == "mirrored":
        return {"strategy": strategy, "replicas": replicas}
    return {"strategy": strategy} | ({"servers": servers, "policy": policy} if strategy == "servers" else {})


def _model(draw):
    inputs = draw(st.sampled_from(["array", "array", "array", "tuple", "dict", "ids", "repeated ids"]))
    return {
        "inputs": inputs,
        "layers": draw(_some(parts.LAYERS, 2)),
        "outputs": draw(st.sampled_from(["one", "one", "list", "dict"])),
        "target": draw(st.sampled_from(["values", "values", "labels", "one-hot"])),
    }


def _loss(draw, fields):
    target, one = fields["target"], fields["outputs"] == "one"
    loss = {
        "loss": draw(st.sampled_from(parts.LOSSES[target])),
        "metrics": draw(_some(parts.METRICS[target], 2)),
    }
    loss["sample_weight"] = draw(st.sampled_from(["", "", "positive", "zeros"]))
    if loss["sample_weight"]:
        # One number for a batch cannot be weighted by rows.
        choices = [metric for metric in parts.METRICS[target] if metric != "root_of_mean"]
        loss["weighted_metrics"] = draw(_some(choices, 1))
    if not one:
        loss["second_loss"] = draw(st.sampled_from(parts.VALUE_LOSSES))
        loss["loss_weights"] = draw(st.sampled_from([(), (0.3, 2.0)]))
    if one and target != "values" and not loss["sample_weight"]:
        loss["class_weight"] = draw(st.booleans())
    if one and target == "values" and fields["inputs"] == "array":
        loss["step"] = draw(st.sampled_from(("", "", "", "", *parts.STEPS)))
    return loss


def _optimizer(draw):
    name = draw(st.sampled_from(list(parts.OPTIMIZERS)))
    options = draw(_some((*parts.OPTIMIZERS[name], *parts.OPTIONS), 2))
    chosen = {option.split("=")[0]: option for option in options}
    if "ema_overwrite_frequency" in chosen:
        chosen["use_ema"] = "use_ema=True"
    if "nesterov" in chosen:
        chosen["momentum"] = "momentum=0.9"
    clips = [key for key in chosen if "clip" in key]
    for extra in clips[1:]:
        del chosen[extra]
    return {
        "optimizer": name,
        "options": tuple(sorted(chosen.values())),
        "rate": draw(st.sampled_from((parts.RATES[0], *parts.RATES))),
        "loss_scale": draw(st.sampled_from([False, False, False, True])),
        "steps_per_execution": draw(st.sampled_from([1, 1, 1, 2, 3])),
    }


def _input(draw, fields):
    kinds = ["dataset", "arrays", "generator", "python generator", "sequence"]
    rows, batch_size = draw(st.integers(1, 13)), draw(st.integers(1, 6))
    drawn = {"input": draw(st.sampled_from(kinds)), "rows": rows, "batch_size": batch_size}
    drawn["epochs"] = draw(st.integers(1, 3))
    whole = fields["strategy"] != "servers" or fields["policy"] == _SEQUENTIAL
    if drawn["input"] == "python generator" or (
        drawn["input"] in ("dataset", "generator") and whole and draw(st.sampled_from([False, False, True]))
    ):
        drawn["steps_per_epoch"] = draw(st.integers(1, 4))
    validations = ["", "", "arrays", "dataset"]
    if drawn["input"] == "arrays" and rows >= 4:
        validations.append("split")
    drawn["validation"] = draw(st.sampled_from(validations))
    if drawn["input"] == "arrays":
        drawn["shuffle"] = draw(st.sampled_from([False, False, True]))
    return drawn
