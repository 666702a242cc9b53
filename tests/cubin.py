"""What a compiled kernel is like, read from its cubin (an ELF file): code size, stack frame, registers."""

import struct
from dataclasses import dataclass

# Attributes in .nv.info: 4 bytes (format, attribute, size), then `size` bytes where the format says so.
_SIZED = 4
_FRAME_SIZE = 0x11  # (symbol, bytes)
_REGISTERS = 0x2F  # (symbol, number)


@dataclass
class Kernel:
    """code: bytes of instructions; frame: bytes of local memory a thread; registers: a thread."""

    code: int
    frame: int
    registers: int


def kernels(cubin) -> dict:
    """{name: Kernel} of a cubin. A kernel's code includes the functions that were not inlined into it."""
    sections, names = _sections(cubin)
    symbols = _symbols(cubin, sections, names)
    facts = {(symbols[index], attribute): value for attribute, index, value in _attributes(cubin, sections)}
    found = {}
    for section, (_, _, size, _) in sections.items():
        if section.startswith(".text."):
            name = section.removeprefix(".text.")
            found[name] = Kernel(size, facts[name, _FRAME_SIZE], facts[name, _REGISTERS])
    return found


def _sections(elf):
    """{name: (type, offset, size, link)}, and the names by index."""
    assert elf[:5] == b"\x7fELF\x02", "not a 64-bit ELF file"
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, strings = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQII", elf, table + entry * i) for i in range(count)]
    base = headers[strings][4]
    names = [_text(elf, base + header[0]) for header in headers]
    return {name: (h[1], h[4], h[5], h[6]) for name, h in zip(names, headers, strict=True)}, names


def _symbols(elf, sections, names):
    _, offset, size, link = sections[".symtab"]
    strings = sections[names[link]][1]
    return [
        _text(elf, strings + struct.unpack_from("<I", elf, at)[0]) for at in range(offset, offset + size, 24)
    ]


def _attributes(elf, sections):
    """(attribute, symbol index, value) of frame sizes and register counts."""
    _, at, size, _ = sections[".nv.info"]
    end = at + size
    while at < end:
        form, attribute, length = struct.unpack_from("<BBH", elf, at)
        at += 4
        if form == _SIZED:
            if attribute in (_FRAME_SIZE, _REGISTERS):
                yield attribute, *struct.unpack_from("<II", elf, at)
            at += length


def _text(elf, at):
    return elf[at : elf.index(b"\0", at)].decode()
