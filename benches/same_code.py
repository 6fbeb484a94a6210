"""Which kernels have other machine code than before: for a change that should change none.

    SOK_CUBINS=/tmp/before make test-rust    # before the change; in a clone, say
    SOK_CUBINS=/tmp/after make test-rust
    python benches/same_code.py /tmp/before /tmp/after

Prints a line for each kernel and architecture whose code differs, with the number of instructions that do.
"""

import struct
import sys
from pathlib import Path

INSTRUCTION = 16


def main(before, after):
    old, new = kernels(Path(before)), kernels(Path(after))
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(name, "is only in", before if name in old else after)
        elif old[name] != new[name]:
            pairs = zip(*map(instructions, (old[name], new[name])), strict=False)
            print(
                name,
                f"{sum(a != b for a, b in pairs)} of {len(old[name]) // INSTRUCTION} -> {len(new[name]) // INSTRUCTION}",
            )
    print(
        f"{sum(old.get(name) == code for name, code in new.items())} of {len(new)} kernels have the same machine code"
    )


def instructions(code):
    return [code[at : at + INSTRUCTION] for at in range(0, len(code), INSTRUCTION)]


def kernels(folder):
    """Machine code by file and kernel."""
    found = {}
    for path in folder.glob("*.cubin"):
        sections = dict(sections_of(path.read_bytes()))
        for line in path.with_suffix(".names").read_text().splitlines():
            symbol, name = line.split("\t")
            found[f"{path.stem}: {name}"] = sections[f".text.{symbol}"]
    return found


def sections_of(elf):
    """Yields name and bytes of each section of a 64-bit ELF file."""
    at, size, count, names_index = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + size * number) for number in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length in headers:
        yield elf[names + name : elf.index(b"\0", names + name)].decode(), elf[offset : offset + length]


if __name__ == "__main__":
    main(*sys.argv[1:])
