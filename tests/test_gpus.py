"""mpi_launch/gpus.py against a driver made for the test: which extra fits it, how many GPUs are usable."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parent.parent / "mpi_launch" / "gpus.py"
DRIVER = """
static const int majors[] = {%(majors)s};
int cuInit(unsigned flags) { return %(init)d; }
int cuDriverGetVersion(int* version) { *version = %(version)d; return 0; }
int cuDeviceGetCount(int* count) { *count = sizeof(majors) / sizeof(int) - 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = 100 + index; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = majors[device - 100];
  return attribute == 75 ? 0 : 1;
}
"""


@pytest.mark.parametrize(
    "version, majors, init, told",
    [
        (13010, [9, 9], 0, "cuda13 2"),
        (12080, [9, 8, 10], 0, "cuda12 2"),
        (13000, [8, 7], 0, "none 0"),
        (11080, [9], 0, "none 0"),
        (13000, [], 0, "none 0"),
        (13000, [9], 100, "none 0"),  # no device, or a driver that does not fit the kernel module
    ],
)
def test_driver(tmp_path, version, majors, init, told):
    text = DRIVER % dict(majors=", ".join(map(str, [*majors, 0])), version=version, init=init)
    compiler = sysconfig.get_config_var("CC").split()[0]
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=text, text=True, check=True
    )
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (told + "\n", "")


def test_no_driver(tmp_path):
    """Whatever this machine has: dlopen finds a file that is no library first."""
    (tmp_path / "libcuda.so.1").write_text("")
    environ = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, PROGRAM], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("none 0\n", "")
