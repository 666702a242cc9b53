"""Integers as users pass them: Python's and NumPy's, but no bools and no floats."""

import operator


def integer(name, value) -> int:
    """`value` as an int. TypeError if it is none; `name` is what the user calls it."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an int, got {value!r}")


def positive(name, value) -> int:
    """`value` as an int of at least 1. TypeError, ValueError."""
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
    return number
