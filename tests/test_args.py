"""args.h is read by ctypes, by the C++ compiler of the CPU device and by NVRTC. All see the same layout."""

import ctypes
import subprocess
import sysconfig

import pytest
from cupy_backends.cuda.libs import nvrtc

from epcomm.runtime import _fibers, args, kernel_dir

STRUCTS = {name: struct for name, struct in vars(args).items() if isinstance(struct, type(ctypes.Structure))}
KERNELS = sorted(path.stem for path in kernel_dir().glob("*.cu"))


def struct_of(kernel):
    """dispatch -> DispatchArgs."""
    return STRUCTS["".join(word.capitalize() for word in kernel.split("_")) + "Args"]


def checks():
    """C++ that compiles only where every struct and field lies as ctypes has it."""
    lines = ['#include "args.h"']
    for name, struct in STRUCTS.items():
        lines.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "{name}");')
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            lines.append(
                f"static_assert(__builtin_offsetof({name}, {field}) == {place.offset} "
                f'&& sizeof((({name}*)0)->{field}) == {place.size}, "{name}.{field}");'
            )
    return "\n".join(lines) + "\n"


def compile_cpp(text):
    compiler = sysconfig.get_config_var("CXX").split()[0]
    words = [compiler, "-std=c++17", "-fsyntax-only", f"-I{kernel_dir()}", "-x", "c++", "-"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else done.stderr


def compile_cuda(text):
    header = (kernel_dir() / "args.h").read_text()
    program = nvrtc.createProgram(text, "checks.cu", (header.encode(),), (b"args.h",))
    try:
        nvrtc.compileProgram(program, ("--std=c++17", "-arch=sm_90"))
        return ""
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("compile_text", [compile_cpp, compile_cuda])
def test_every_field_lies_where_the_compiler_puts_it(compile_text):
    text = checks()
    assert text.count("static_assert") > 100
    assert compile_text(text) == ""
    wrong = text.replace("sizeof(World) == ", "sizeof(World) == 1 + ", 1)
    assert "World" in compile_text(wrong)  # the compiler does look


def test_every_kernel_is_registered_with_its_struct():
    assert _fibers.kernels() == {kernel: ctypes.sizeof(struct_of(kernel)) for kernel in KERNELS}


def test_constants():
    assert (args.DTYPE_BF16, args.DTYPE_F16, args.DTYPE_F32) == (0, 1, 2)
    assert args.NUM_OPERATIONS == 1 + max(
        value for name, value in vars(args).items() if name.startswith("OP_")
    )


@pytest.mark.parametrize(
    "text, told",
    [
        ("struct A {\n  u32 x = 1;\n};", "cannot read the field"),
        ("struct A {\n  double x;\n};", "unknown type 'double'"),
    ],
)
def test_what_cannot_be_read_is_refused(text, told):
    with pytest.raises(SyntaxError, match=told):
        args._parse(text)
