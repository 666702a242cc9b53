"""Every kernel compiles for Hopper and Blackwell, as the CUDA device would compile it; needs NVRTC, no GPU.

The launches are those that the product asks its device for, with a GPU's numbers: only sizes are listed here.
"""

import cubin
import pytest
from cupy_backends.cuda.libs import nvrtc

import epcomm
from epcomm import testing
from epcomm.runtime import kernel_dir
from epcomm.runtime.cpu import CpuDevice
from epcomm.runtime.source import kernel_options, kernel_source

ARCHITECTURES = ("sm_90", "sm_100")
NAMES = sorted(path.stem for path in kernel_dir().glob("*.cu"))
# Bytes of code: a kernel much larger than the instruction caches stalls on its own code. What is above the
# general limit is named with its size, so that it does not grow unnoticed; so is local memory (spills).
MAX_CODE = dict.fromkeys(NAMES, 48 << 10) | {"plan": 58 << 10, "combine": 50 << 10}
MAX_FRAME = dict.fromkeys(NAMES, 0) | {"combine": 64, "low_latency_combine": 256}

# (ranks, SMs of the GPU, settings)
BUFFERS = [
    (2, 132, dict(hidden=7168, num_topk=8, num_experts=384, num_sms=64)),
    (2, 132, dict(hidden=7168, num_topk=8, num_experts=384, num_sms=32)),
    (8, 148, dict(hidden=4096, num_topk=6, num_experts=256)),
    (1, 132, dict(hidden=8, num_topk=1, num_experts=1)),
    (3, 132, dict(hidden=5120, num_topk=2, num_experts=9, dtype="float16")),
    (5, 132, dict(hidden=200, num_topk=9, num_experts=20, dtype="float32")),
]
_LOW_LATENCY = dict(num_experts=256, hidden_size=7168, topk=8, max_tokens_per_rank=128)
_RANK_MAJOR, _DIRECT_SEND = epcomm.DispatchLayout.RANK_MAJOR, epcomm.CombineMode.DIRECT_SEND
# (ranks, how rows are sent, settings)
COMMUNICATORS = [
    (2, "lines", _LOW_LATENCY),
    (2, "lines", _LOW_LATENCY | dict(output_layout=_RANK_MAJOR, quant=epcomm.QuantConfig())),
    (8, "lines", _LOW_LATENCY | dict(quant=epcomm.QuantConfig(power_of_two_scales=True))),
    (8, "flags", _LOW_LATENCY | dict(output_layout=_RANK_MAJOR)),
    (2, "lines", _LOW_LATENCY | dict(combine_mode=_DIRECT_SEND)),
    (
        5,
        "flags",
        dict(num_experts=10, hidden_size=200, topk=32, max_tokens_per_rank=9, combine_mode=_DIRECT_SEND),
    ),
]


def _make_buffer(group, settings):
    epcomm.Buffer(group, num_tokens=64, **settings).close()


def _make_communicator(group, settings):
    epcomm.MoECommunicator(group, **settings).close()


@pytest.fixture(scope="module")
def launches():
    """What the product launches: {name: {(argument struct, threads, shape)}}."""
    found = {name: set() for name in NAMES}

    def launcher(self, name, a, *, grid, block, shared=0, shape=None):
        found[name].add((type(a), block, tuple(sorted((shape or {}).items()))))
        return lambda stream=0: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "launcher", launcher)
        patch.setattr(CpuDevice, "max_threads", 1024)
        for ranks, sms, settings in BUFFERS:
            patch.setattr(CpuDevice, "num_sms", sms)
            testing.run_threads(ranks, _make_buffer, settings)
        for ranks, signal, settings in COMMUNICATORS:
            patch.setenv("EPCOMM_LL_SIGNAL", signal)
            testing.run_threads(ranks, _make_communicator, settings)
    return found


def compile_kernel(name, args_type, block, shape, architecture):
    """The cubin of one kernel; AssertionError with the compiler's log if it had errors or warnings."""
    program = nvrtc.createProgram(kernel_source(name, args_type), f"{name}.cu", (), ())
    try:
        failed = False
        try:
            nvrtc.compileProgram(program, (*kernel_options(block, dict(shape)), f"-arch={architecture}"))
        except nvrtc.NVRTCError:
            failed = True
        log = nvrtc.getProgramLog(program)
        assert not failed and "warning" not in log, f"{name} for {architecture}, {dict(shape)}:\n{log}"
        return nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_kernel_compiles(name, architecture, launches):
    assert launches[name], f"nothing launches {name}"
    for args_type, block, shape in sorted(launches[name], key=str):
        kernels = cubin.kernels(compile_kernel(name, args_type, block, shape, architecture))
        assert list(kernels) == [name]  # one entry point, all else inlined
        kernel, what = kernels[name], f"{name} of {block} threads, {dict(shape)}: "
        assert 0 < kernel.code <= MAX_CODE[name], what + f"{kernel.code} bytes of code"
        assert kernel.registers * block <= 65536, what + f"{kernel.registers} registers"
        assert kernel.frame <= MAX_FRAME[name], what + f"{kernel.frame} bytes of local memory a thread"
