"""Compiles the CUDA sources of the benchmarks, which use the vocabulary of kernels_cu."""

import re
from pathlib import Path

from epcomm.runtime import kernel_dir

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def load_module(device, path):
    """The kernels of a .cu file as a cupy.RawModule, compiled on first use and cached by CuPy."""
    return device.xp.RawModule(code=source(path), options=("-std=c++17",))


def source(path):
    """One text of the file and all that it includes, each once: CuPy's cache does not look into headers."""
    included = set()

    def expand(match):
        header = kernel_dir() / match[1]
        if header in included or match[1].startswith("cpu/"):  # cpu/: the other device's vocabulary
            return ""
        included.add(header)
        return _INCLUDE.sub(expand, header.read_text())

    return _INCLUDE.sub(expand, Path(path).read_text()).replace("#pragma once\n", "")
