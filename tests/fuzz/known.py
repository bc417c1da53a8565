"""Which differences from one device are by design, and which refusals are documented? Each with its reason."""

import re


def _in_rounds(program):
    return program.batches_in_a_step > 1


def _is_sequential(program):
    return program.strategy == "servers" and not _in_rounds(program)


def _uses(*names):
    return lambda program: bool(set(names) & set(program.layers))


# Programs that are not drawn: (which, reason).
DIFFERENCES = (
    (
        lambda program: _uses("dropout", "noise", "batch norm")(program) and not _is_sequential(program),
        "random layers draw for each replica; BatchNormalization takes the statistics of a replica's rows",
    ),
    (
        lambda program: (
            program.inputs == "repeated ids"
            and (program.optimizer != "SGD" or any("clip" in option for option in program.options))
        ),
        "repeated ids of an embedding are summed into one row of the gradient (README)",
    ),
    (
        lambda program: (
            program.outputs != "one"
            and program.input in ("arrays", "sequence")
            and _in_rounds(program)
            and program.rows % (program.batch_size * program.batches_in_a_step) != 0
        ),
        "Keras weights the logged losses of outputs by rows only where all batches have one static size",
    ),
    (
        lambda program: program.outputs != "one" and program.input == "sequence",
        "one device alone logs losses of outputs that do not add up to the loss (one batch of one row: half of it)",
    ),
)

# (which programs, words of the error, reason).
REFUSALS = (
    (_uses("spectral norm"), r"trainable", "assigns a trainable variable in its forward pass (README)"),
)


def difference(program):
    """Returns why a program may differ from one device, or None."""
    return next((reason for which, reason in DIFFERENCES if which(program)), None)


def refusal(program, error):
    """Returns why a program is refused with these words, or None."""
    return next(
        (reason for which, words, reason in REFUSALS if which(program) and re.search(words, error)), None
    )
