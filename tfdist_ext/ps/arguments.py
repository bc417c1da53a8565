"""Which arguments are refused, and in which words?"""

from __future__ import annotations

import numbers


def require_count(name: str, value: float, at_least: int = 0) -> None:
    """Refuses what is no whole number of at least some value.

    Args:
        name: Of the argument.
        value: What was received.
        at_least: The least allowed.

    Raises:
        ValueError: Naming the argument, the value and one that is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < at_least:
        raise ValueError(
            f"Argument `{name}` must be a whole number of at least {at_least}; received {value!r}. Try "
            f"`{name}={at_least}`."
        )


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices.

    Args:
        name: Of the argument.
        value: What was received.
        choices: What is allowed.

    Raises:
        ValueError: Naming the argument, the value and one that is allowed.
    """
    if value not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(
            f'Argument `{name}` must be {expected}; received {value!r}. Try `{name}="{choices[0]}"`.'
        )
