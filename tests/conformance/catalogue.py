"""Which public names does the installed Keras have? Found from its modules; aliases of one class count once."""

import inspect

import keras

MODULES = {
    "layers": keras.layers,
    "losses": keras.losses,
    "metrics": keras.metrics,
    "optimizers": keras.optimizers,
    "schedules": keras.optimizers.schedules,
    "regularizers": keras.regularizers,
    "constraints": keras.constraints,
    "initializers": keras.initializers,
    "callbacks": keras.callbacks,
}
FAMILIES = tuple(MODULES)


def names_of(module):
    """Returns the names of the public classes of a module, sorted, each class once under its own name."""
    names = {}
    for name in dir(module):
        value = getattr(module, name)
        if not name.startswith("_") and inspect.isclass(value):
            names.setdefault(value, []).append(name)
    return sorted(_own_name(value, aliases) for value, aliases in names.items())


def catalogue():
    """Returns family -> names."""
    return {family: names_of(module) for family, module in MODULES.items()}


def _own_name(value, aliases):
    return value.__name__ if value.__name__ in aliases else min(aliases)
