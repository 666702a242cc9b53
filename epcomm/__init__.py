"""Expert-parallel communication for Mixture-of-Experts layers, on GPUs and on CPU ranks."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__
    from .arrays import asarray as asarray
    from .arrays import to_dlpack as to_dlpack
    from .buffer import Buffer as Buffer
    from .buffer import Combined as Combined
    from .buffer import Dispatched as Dispatched
    from .errors import DriverError as DriverError
    from .errors import EpcommError as EpcommError
    from .errors import HandleError as HandleError
    from .errors import PeerTimeoutError as PeerTimeoutError
    from .group import Group as Group
    from .low_latency import CombineMode as CombineMode
    from .low_latency import MoECommunicator as MoECommunicator
    from .low_latency import MoEMode as MoEMode
    from .low_latency_output import DispatchHandle as DispatchHandle
    from .low_latency_output import DispatchLayout as DispatchLayout
    from .low_latency_output import DispatchOutput as DispatchOutput
    from .plan import Plan as Plan
    from .pool import ExpertPool as ExpertPool
    from .quant import DispatchDataType as DispatchDataType
    from .quant import QuantConfig as QuantConfig

_HOME = {
    "Group": "group",
    "Buffer": "buffer",
    "Dispatched": "buffer",
    "Combined": "buffer",
    "Plan": "plan",
    "ExpertPool": "pool",
    "asarray": "arrays",
    "to_dlpack": "arrays",
    "MoECommunicator": "low_latency",
    "MoEMode": "low_latency",
    "DispatchLayout": "low_latency_output",
    "CombineMode": "low_latency",
    "DispatchOutput": "low_latency_output",
    "DispatchHandle": "low_latency_output",
    "DispatchDataType": "quant",
    "QuantConfig": "quant",
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
