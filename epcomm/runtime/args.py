"""The kernels' argument structs as ctypes types, read from kernels_cu/args.h.

The header is the one source: CUDA and the CPU build compile it, this module parses it. `args.DispatchArgs` is
the struct, `args.DTYPE_BF16` a constant. A test compares sizes with the compiled ones.
"""

import ctypes
import re

from . import kernel_dir

_SCALARS = {
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float,
}  # fmt: skip

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_CONSTANT = re.compile(r"^#define[ \t]+(\w+)[ \t]+(\d+)[ \t]*$", re.M)
_STRUCT = re.compile(r"struct\s+(\w+)\s*\{(.*?)\};", re.S)
_FIELD = re.compile(r"(?:const\s+)?(?:struct\s+)?(\w+)\s*(\**)\s*(\w+)\s*(?:\[(\w+)\])?$")


def _parse(text):
    text = _COMMENT.sub("", text)
    names = {name: int(value) for name, value in _CONSTANT.findall(text)}
    structs = {}
    for struct, body in _STRUCT.findall(text):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            match = _FIELD.match(declaration)
            if match is None:
                raise SyntaxError(f"args.h: struct {struct}: cannot read the field {declaration!r}")
            kind, stars, field, count = match.groups()
            if stars:
                ctype = ctypes.c_void_p
            elif kind in _SCALARS:
                ctype = _SCALARS[kind]
            elif kind in structs:
                ctype = structs[kind]
            else:
                raise SyntaxError(f"args.h: struct {struct}: unknown type {kind!r} of field {field!r}")
            if count is not None:
                ctype = ctype * (names[count] if count in names else int(count))
            fields.append((field, ctype))
        structs[struct] = type(struct, (ctypes.Structure,), {"_fields_": fields, "__module__": __name__})
    return names | structs


globals().update(_parse((kernel_dir() / "args.h").read_text()))
