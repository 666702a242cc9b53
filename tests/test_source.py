"""The text that the CUDA compiler gets: headers inlined once, lines counted by file, the struct checked."""

import ctypes
import re

import pytest

from epcomm.runtime import args, source


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "kernel_dir", lambda: tmp_path)
    (tmp_path / "args.h").write_text("#pragma once\nstruct ToyArgs { int a; };\n")
    (tmp_path / "base.cuh").write_text('#pragma once\n#include "args.h"\nint base;\n')
    (tmp_path / "more.cuh").write_text(
        '#pragma once\n#include "base.cuh"\n#ifndef __CUDACC__\n#include "cpu/x.h"\n#endif\n'
    )
    (tmp_path / "toy.cu").write_text(
        '#include "base.cuh"\n#include <limits>\n  #include "more.cuh"\nint toy;\n'
    )
    return tmp_path


class ToyArgs(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int)]


def test_every_header_of_ours_is_there_once(folder):
    text = source.kernel_source("toy", ToyArgs)
    for once in ("struct ToyArgs", "int base;", "int toy;", "#include <limits>", '#include "cpu/x.h"'):
        assert text.count(once) == 1, once
    assert "#pragma once" not in text and '"base.cuh"\n#include' not in text
    assert "static_assert(sizeof(ToyArgs) == 4" in text


def test_every_line_is_counted_as_in_its_file(folder):
    place, found = None, {}
    for line in source.kernel_source("toy", ToyArgs).splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if directive:
            place = (directive[2], int(directive[1]))
        else:
            found[line] = place
            place = (place[0], place[1] + 1)
    assert found["struct ToyArgs { int a; };"] == ("args.h", 2)
    assert found["int base;"] == ("base.cuh", 3)
    assert found["int toy;"] == ("toy.cu", 4)
    assert found['#include "cpu/x.h"'] == ("more.cuh", 4)


def test_an_edited_header_is_a_different_text(folder):
    before = source.kernel_source("toy", ToyArgs)
    (folder / "args.h").write_text("#pragma once\nstruct ToyArgs { unsigned a; };\n")
    assert source.kernel_source("toy", ToyArgs) != before


def test_options_do_not_depend_on_the_order_of_the_shape():
    options = source.kernel_options(256, {"topk": 8, "hidden": 7168})
    assert options == ("--std=c++17", "-DBLOCK_THREADS=256", "-DSHAPE_hidden=7168", "-DSHAPE_topk=8")
    assert options == source.kernel_options(256, {"hidden": 7168, "topk": 8})


def test_a_kernel_that_is_not_there_and_those_that_are():
    with pytest.raises(ValueError, match=r"no kernel is called 'despatch'; there are .*dispatch"):
        source.kernel_source("despatch", args.DispatchArgs)


def test_the_compiler_compares_the_size_of_the_struct():
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")

    class World(ctypes.Structure):  # of the right name and the wrong size
        _fields_ = [("rank", ctypes.c_int)]

    for struct, agrees in [(args.DispatchArgs, True), (World, False)]:
        program = nvrtc.createProgram(source.kernel_source("dispatch", struct), "dispatch.cu", (), ())
        options = source.kernel_options(256, {"topk": 2, "row_bytes": 256, "ranks": 2})
        try:
            nvrtc.compileProgram(program, (*options, "-arch=sm_90"))
        except nvrtc.NVRTCError:
            assert not agrees and "args.h is compiled and parsed differently" in nvrtc.getProgramLog(program)
        else:
            assert agrees
