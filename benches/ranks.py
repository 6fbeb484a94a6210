"""A training step of two ranks with a thread each, beside one process with two threads, on the same global batch.

    make bench                              # or: python benches/ranks.py [--rounds 5]

Work: 26 features x 16,384 samples, one id each, dim 64, Adam, as in `benches/step.py`. A rank has half of each batch. Both hold all ids of
the vocabulary. Processes take turns; a cell is the median over rounds.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import work

DIM = 64


def step_of_rank(rank, ranks):
    """The step of one of several ranks, and its share of the batches."""
    from native_step import NativeStep

    step = NativeStep(len(work.sizes()), DIM, "adam", samples=work.BATCH // ranks)
    start = 0
    for table, count in zip(step.tables, work.sizes(), strict=True):
        keys = work.scattered(start, count)
        start += count
        own = np.asarray(table.owners(keys)[0]) == rank if ranks > 1 else slice(None)
        table.find_or_insert(keys[own])
    share = slice(rank * work.BATCH // ranks, (rank + 1) * work.BATCH // ranks)
    step.take([[feature[share] for feature in work.features_of(batch)] for batch in work.batches("onehot")])
    return step


def measure(runs):
    """Prints the median time of a step and the time of each of its parts, in milliseconds."""
    import sok_keras as sok
    from sok_keras.backend import native

    sok.init(timeout=300)
    ranks = sok.world_size()
    native.set_num_threads(1 if ranks > 1 else 2)
    step = step_of_rank(sok.rank(), ranks)
    for number in range(2 * work.NUM_BATCHES):
        step.run(number)
    sok.barrier()
    times = []
    for number in range(runs):
        start = time.perf_counter()
        step.run(number)
        times.append(1e3 * (time.perf_counter() - start))
    step.group.measure(True)
    for number in range(work.NUM_BATCHES):
        step.run(number)
    parts = {name: 1e3 * seconds / work.NUM_BATCHES for name, _, seconds in step.group.take_profile() if seconds}
    if sok.rank() == 0:
        print(np.median(times), *(f"{name}={ms:.1f}" for name, ms in parts.items()), flush=True)


def ask(ranks, runs):
    launcher = ["-m", "sok_keras.launch", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--runs", str(runs), "--part"]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    ms, *parts = done.stdout.split()
    return float(ms), " ".join(parts)


def main():
    parser = work.parser(__doc__, rounds=5, runs=12)
    parser.add_argument("--part", action="store_true", help="used by the bench itself")
    arguments = parser.parse_args()
    if arguments.part:
        return measure(arguments.runs)
    of_ranks = {1: [], 2: []}
    for _ in range(arguments.rounds):
        for ranks, found in of_ranks.items():
            found.append(ask(ranks, arguments.runs))
    one, two = ([ms for ms, _ in of_ranks[ranks]] for ranks in (1, 2))
    rows = [
        ["one process, 2 threads", work.ms(one), "", of_ranks[1][-1][1]],
        ["2 ranks, a thread each", work.ms(two), work.ratio(two, one)[0], of_ranks[2][-1][1]],
    ]
    table = work.table(["", "ms", "ratio", "parts, ms"], rows)
    work.report("A training step of ranks on a CPU", arguments, table)


if __name__ == "__main__":
    main()
