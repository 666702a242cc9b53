"""The libraries that a comparison can run, one module each.

A module has `missing(group) -> str | None` (why it cannot run here) and a class `Library(group, shape)`:

    load(topk_idx, x, topk_weights)   this rank's inputs, on the device: what timing must not include
    operations() -> {name: function}  those of bench_vs_deepep's plan, d_f, d_b, c_f, c_b, pf that it has
    round_trip() -> [s, H]            dispatch, then combine of the same rows: a token times its valid entries
    figures(session) -> dict          more results of the loaded case
    close()                           collective; not after an exception, when the peers may never come

Every function works on the current stream and may be called any number of times in a row.
"""

import importlib

NAMES = ("epcomm", "nccl", "mpi", "deepep_v2")
_MODULES = {name: f"bench.libs.{name}_lib" for name in NAMES} | {"deepep_v2": "bench.libs.deepep_lib"}


def module(name):
    """The adapter module of a library.

    Raises:
        ValueError: no such library.
    """
    if name not in _MODULES:
        raise ValueError(f"--libs: expected some of {', '.join(NAMES)}, got {name!r}")
    return importlib.import_module(_MODULES[name])


def peer_of(group):
    """The library that stands beside epcomm in every run on this kind of device."""
    return "nccl" if group.device.kind == "cuda" else "mpi"


def quality(row):
    """How well a library's own exchange does, as a text from the `figures` in its row; None without them."""
    if "permute_gbps" not in row:
        return None
    return (
        f"permute {row['permute_us']:.0f} us = {row['permute_gbps'] / 1e3:.2f} TB/s; "
        f"exchange {row['exchange_us']:.0f} us, "
        f"bare grouped send/recv of the same rows {row['bare_exchange_us']:.0f} us"
    )
