"""What the CUDA compiler gets: one source text a kernel, and the options that make its shapes constants.

CuPy's disk cache of compiled kernels goes by this text and these options and does not look into headers. With
our headers inlined an edited one is a different text, so an old kernel never runs in its place.
"""

import ctypes
import re

from . import kernel_dir

_INCLUDE = re.compile(r'#include "([^"]+)"')


def kernel_source(name, args_type) -> str:
    """The text of kernel `name` with our headers in it, and a check that its parameter has the right size.

    Args:
        name: of a file in kernels_cu, without ".cu".
        args_type: the ctypes struct of the kernel's parameter, called as in args.h.

    Raises:
        ValueError: there is no such kernel.
    """
    if not (kernel_dir() / f"{name}.cu").is_file():
        known = sorted(path.stem for path in kernel_dir().glob("*.cu"))
        raise ValueError(f"no kernel is called {name!r}; there are {', '.join(known)}")
    struct, size = args_type.__name__, ctypes.sizeof(args_type)
    check = f'static_assert(sizeof({struct}) == {size}, "args.h is compiled and parsed differently");'
    return "\n".join([*inlined(f"{name}.cu", set()), check, ""])


def kernel_options(block, shape) -> tuple:
    """The compiler's options for `block` threads a block and the constants SHAPE_x of `shape` {x: int}."""
    constants = [f"-DSHAPE_{field}={value}" for field, value in sorted(shape.items())]
    return ("--std=c++17", f"-DBLOCK_THREADS={block}", *constants)


def inlined(file, seen):
    """The lines of a file of kernels_cu (or an absolute path), each of our headers at its first #include.

    #line keeps the compiler's messages pointing at the files. `seen`: the set of files that are in already.
    """
    seen.add(file)
    yield f'#line 1 "{file}"'
    for number, line in enumerate((kernel_dir() / file).read_text().splitlines(), 1):
        include = _INCLUDE.match(line.strip())
        if line.strip() == "#pragma once":
            yield ""
        elif include is None or include[1].startswith("cpu/"):  # that is behind an #ifndef __CUDACC__
            yield line
        elif include[1] in seen:
            yield ""
        else:
            yield from inlined(include[1], seen)
            yield f'#line {number + 1} "{file}"'
