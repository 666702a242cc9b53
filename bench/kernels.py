"""Compiles the CUDA sources of the benchmarks, which use the vocabulary of kernels_cu."""

from epcomm.runtime.source import inlined


def load_module(device, path):
    """The kernels of a .cu file as a cupy.RawModule, compiled on first use and cached by CuPy."""
    return device.xp.RawModule(code=source(path), options=("--std=c++17",))


def source(path):
    """The text of a .cu file with the headers of kernels_cu in it."""
    return "\n".join([*inlined(str(path.resolve()), set()), ""])
