"""The seam between one program and two kinds of device."""

from pathlib import Path


def kernel_dir() -> Path:
    """The folder of the kernel sources: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "kernels_cu"
    return installed if installed.is_dir() else package.parent / "kernels_cu"
