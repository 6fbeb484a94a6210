"""Tables that grow from nothing: speed of insertion, the longest pause, memory.

    python benches/growth.py [--keys 10000000]

Ten million fresh keys at dim 16 with Adam's states (8 + 192 bytes a key) come in training steps of 65,536 ids through the native
entry points, into one table and into 26. Timed is the lookup, which inserts; "memory" is what the process holds more after the
last step than before the first, over keys and records; the buffers of steps count.

A virtual machine may have to ask its host for memory that nobody has used lately, which can take longer than all else here. So it
is measured twice: on memory as it comes, and, before each step, with enough of it just used and given back.
"""

import mmap
import statistics
import time

import numpy as np

import work

DIM, STEP_IDS = 16, 65_536
BYTES_A_KEY = 8 + 3 * 4 * DIM
# More than any step takes: each of 26 tables may begin some huge pages.
STEP_BYTES = 256 << 20


def main():
    parser = work.parser(__doc__, runs=1)
    parser.add_argument("--keys", type=int, default=10_000_000)
    arguments = parser.parse_args()
    rows, speeds = [], []
    for _ in range(arguments.rounds):
        speeds.append(work.in_own_process(memory_speeds, arguments.keys * BYTES_A_KEY))
    for num_tables in (1, 26):
        for is_used in (False, True):
            rounds = [work.in_own_process(measure, num_tables, is_used, arguments) for _ in range(arguments.rounds)]
            figures = (f"{statistics.median(figures):.2f}" for figures in zip(*rounds, strict=True))
            rows.append([num_tables, "just used" if is_used else "as it comes", *figures])
    columns = ["tables", "host's memory", "Mkeys/s", "median call ms", "longest call ms", "memory / (keys + records)"]
    fresh, used = (statistics.median(speed) for speed in zip(*speeds, strict=True))
    machine = (
        f"One thread's first touch of memory, in huge pages: {fresh:.2f} GB/s as it comes, {used:.2f} GB/s just used."
    )
    work.report("Growth", arguments, machine, work.table(columns, rows))


def measure(num_tables, is_used, arguments):
    from native_step import NativeStep, native

    native.set_num_threads(arguments.threads)
    samples = STEP_IDS // num_tables
    num_steps = -(-arguments.keys // (samples * num_tables))
    step = NativeStep(num_tables, DIM, samples=samples)
    rows = np.arange(num_steps * num_tables * samples).reshape(num_steps, num_tables, samples, 1)
    step.take(rows)
    before, times = work.memory_bytes("VmRSS"), []
    for number in range(num_steps):
        if is_used:
            touch(STEP_BYTES)
        start = time.perf_counter()
        step.lookup(number)
        times.append(1e3 * (time.perf_counter() - start))
        step.update(number)
    memory = work.memory_bytes("VmRSS") - before
    speed = rows.size / 1e3 / sum(times)
    return speed, statistics.median(times), max(times), memory / (rows.size * BYTES_A_KEY)


def touch(num_bytes):
    """Seconds to use so much new memory in huge pages. It is given back."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = time.perf_counter()
        np.frombuffer(memory, "uint8")[::4096] = 1
        return time.perf_counter() - start


def memory_speeds(num_bytes):
    """GB/s of memory as it comes, and of the same memory again."""
    return [num_bytes / 1e9 / touch(num_bytes) for _ in range(2)]


if __name__ == "__main__":
    main()
