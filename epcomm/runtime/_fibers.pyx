# cython: language_level=3
# distutils: language = c++
"""Kernels on the CPU: every CUDA thread a fiber of the calling OS thread (kernels_cu/cpu)."""

cdef extern from * nogil:
    """
    extern "C" {
    int epcomm_launch(const char* name, unsigned grid, unsigned block, size_t shared, const void* args);
    const char* epcomm_launch_error();
    void epcomm_set_schedule(unsigned long long seed);
    unsigned epcomm_num_kernels();
    const char* epcomm_kernel_name(unsigned i);
    size_t epcomm_kernel_args_bytes(unsigned i);
    const char* epcomm_bad_kernel();
    }
    """
    int epcomm_launch(const char* name, unsigned grid, unsigned block, size_t shared, const void* args)
    const char* epcomm_launch_error()
    void epcomm_set_schedule(unsigned long long seed)
    unsigned epcomm_num_kernels()
    const char* epcomm_kernel_name(unsigned i)
    size_t epcomm_kernel_args_bytes(unsigned i)
    const char* epcomm_bad_kernel()

if epcomm_bad_kernel() != NULL:
    raise ImportError(
        f"kernel {epcomm_bad_kernel().decode()} cannot be registered: twice there, or too much of it"
    )


def launch(str name, unsigned grid, unsigned block, size_t shared, size_t args_address):
    """Run kernel `name` to its end on the calling thread; other Python threads go on meanwhile.

    `args_address` points at the kernel's argument struct, which is copied. `shared` is in bytes.
    ValueError: no such kernel, or a grid that cannot be launched. RuntimeError: a deadlock or a misuse that
    the runtime noticed; the message names block and thread and what they wait for.
    """
    cdef bytes encoded = name.encode()
    cdef const char* c_name = encoded
    cdef int status
    with nogil:
        status = epcomm_launch(c_name, grid, block, shared, <const void*>args_address)
    if status != 0:
        raise (ValueError if status == 1 else RuntimeError)(epcomm_launch_error().decode())


def kernels():
    """{name: size of its argument struct in bytes}."""
    return {epcomm_kernel_name(i).decode(): epcomm_kernel_args_bytes(i) for i in range(epcomm_num_kernels())}


def set_schedule(seed):
    """Draw the order of threads, and late completion of bulk copies, from `seed` in all later launches.

    seed: a positive int, or None: first in, first out, and copies complete at once. The same seed gives the
    same order in the same series of launches of a thread.
    """
    if seed is not None and not 0 < seed < 1 << 63:
        raise ValueError(f"seed: expected None or an int from 1 to 2**63 - 1, got {seed}")
    epcomm_set_schedule(0 if seed is None else seed)
