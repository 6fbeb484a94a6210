"""Dumps: how long a million keys take, and how much memory a large dump needs.

    python benches/dump.py [--gib 2]

Through the native entry points, with Adam's states, in a temporary folder (TMPDIR says where). The time is with all that makes a
dump crash-proof; a load verifies every byte first. Memory is the highest that the process held during a dump of one table over
what it held before.
"""

import ctypes
import tempfile
import time
from pathlib import Path

import work

DIM = 16
BYTES_A_KEY = 8 + 3 * 4 * DIM
CHUNK = 1_000_000


def main():
    parser = work.parser(__doc__, runs=1)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--gib", type=float, default=2)
    arguments = parser.parse_args()
    rounds = work.in_own_process(times, arguments.keys, arguments)
    rise, written, seconds = work.in_own_process(memory, arguments.gib, arguments)
    rows = [
        [what, arguments.keys, work.ms(of_rounds)]
        for what, of_rounds in zip(("dump", "load"), zip(*rounds, strict=True), strict=True)
    ]
    large = f"A dump of {written / 2**30:.2f} GiB took {seconds:.1f} s and {rise / 2**20:.1f} MiB of memory."
    work.report("Dumps", arguments, work.table(["", "keys of dim 16", "ms"], rows), large)


def filled(num_keys):
    from native_step import NativeStep

    step = NativeStep(1, DIM, samples=1)
    for start in range(0, num_keys, CHUNK):
        step.tables[0].find_or_insert(work.scattered(start, min(CHUNK, num_keys - start)))
    return step


def times(num_keys, arguments):
    """Milliseconds of a dump and of a load into a fresh table, by round."""
    from native_step import NativeStep, native

    native.set_num_threads(arguments.threads)
    step, rounds = filled(num_keys), []
    for number in range(arguments.rounds):
        fresh = NativeStep(1, DIM, samples=1)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            native.dump((f"{folder}/dump", step.tables, [], (True, number, True, None)))
            middle = time.perf_counter()
            native.DumpReader(f"{folder}/dump").load(["t0"], fresh.tables, [None], False, True)
            rounds.append([1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)])
        assert len(fresh.tables[0]) == num_keys
    return rounds


def memory(gib, arguments):
    """Bytes of memory that the dump needs, bytes that it writes, its seconds."""
    from native_step import native

    native.set_num_threads(arguments.threads)
    step = filled(int(gib * 2**30 / BYTES_A_KEY))
    ctypes.CDLL(None).malloc_trim(0)  # what filling it left behind would serve the dump
    with tempfile.TemporaryDirectory() as folder:
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what it is now
        before, start = work.memory_bytes("VmRSS"), time.perf_counter()
        native.dump((f"{folder}/dump", step.tables, [], (True, 0, True, None)))
        seconds = time.perf_counter() - start
        rise = work.memory_bytes("VmHWM") - before
        written = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return rise, written, seconds


if __name__ == "__main__":
    main()
