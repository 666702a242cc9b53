"""Expert-parallel communication for Mixture-of-Experts layers, on GPUs and on CPU ranks."""

import importlib

_HOME = {
    "Group": "group",
    "Buffer": "buffer",
    "Dispatched": "buffer",
    "Combined": "buffer",
    "Plan": "plan",
    "ExpertPool": "pool",
    "EpcommError": "errors",
    "DriverError": "errors",
    "HandleError": "errors",
    "PeerTimeoutError": "errors",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    """Public names are imported when they are asked for: importing epcomm itself costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOME])
