"""The driver's types and functions as _driver.h declares them, and life without a driver."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUNTIME = HERE.parent / "epcomm" / "runtime"


def header_folder():
    """A folder with cuda.h: of an installed wheel, or of a toolkit."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        found = None
    else:
        found = find_nvidia_header_directory("cudart")
    for folder in filter(None, (found, "/usr/local/cuda/include")):
        if (Path(folder) / "cuda.h").is_file():
            return folder
    pytest.skip("no cuda.h here")


def compile_types(runtime):
    command = [
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        f"-I{header_folder()}",
        f"-I{runtime}",
        HERE / "driver_types.cpp",
    ]
    return subprocess.run(command, capture_output=True, text=True)


def test_types_and_functions_agree_with_cuda_h():
    result = compile_types(RUNTIME)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("unsigned int numAttrs;", "unsigned long numAttrs[2];"),
        ("int requestedHandleTypes;", "long requestedHandleTypes;"),
        ("HANDLE_TYPE_FABRIC = 8", "HANDLE_TYPE_FABRIC = 4"),
        ("(CUdeviceptr, unsigned char, size_t)", "(CUdeviceptr, int, size_t)"),
        ("(CUdeviceptr, size_t))", "(CUdeviceptr))"),
    ],
)
def test_the_comparison_sees_mistakes(tmp_path, right, wrong):
    text = (RUNTIME / "_driver.h").read_text()
    assert right in text
    (tmp_path / "_driver.h").write_text(text.replace(right, wrong, 1))
    assert compile_types(tmp_path).returncode != 0


def test_without_a_driver_the_modules_import_and_say_what_is_missing():
    code = (
        "from epcomm.runtime import _launch, _vmm\n"
        "try: _vmm._load('libno-such-driver.so')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.startswith("DriverError no CUDA driver: libno-such-driver.so: cannot open")


def test_a_library_that_is_no_driver():
    from epcomm.errors import DriverError
    from epcomm.runtime import _vmm

    with pytest.raises(DriverError, match="cuGetProcAddress_v2"):
        _vmm._load("libm.so.6")
