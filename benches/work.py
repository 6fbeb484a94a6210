"""What the benches share: batches of ids, a process of one's own, steps in turns, the report. No framework is imported here."""

import argparse
import datetime
import itertools
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import turns
from criteo import CARDINALITIES

BACKENDS = os.environ.get("BACKENDS", "tensorflow jax torch").split()
# All tables together; the largest cardinalities are cut to one size.
VOCABULARY, ZIPF, NUM_BATCHES = 1_737_710, 1.05, 4
BATCH = int(os.environ.get("BATCH", 16_384))
BAGS = {"onehot": 1, "bag8": 8}
# Raw ids are row numbers times this: they look like hashes.
ODD = np.uint64(0xA24BAED4963EE407)


# ---- ids


def sizes():
    """Rows of each table."""
    low, high = 1, max(CARDINALITIES)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(c, middle) for c in CARDINALITIES) <= VOCABULARY else (low, middle - 1)
    rows = np.array([min(c, low) for c in CARDINALITIES])
    rows[np.argmax(CARDINALITIES)] += VOCABULARY - rows.sum()
    return rows.tolist()


def offsets():
    """Number of the first row of each table, counted over all tables."""
    return np.concatenate([[0], np.cumsum(sizes())[:-1]])


def batches(case):
    """Yields row numbers `(BATCH, 26, bag)` int64, counted over all tables, by Zipf's law in each."""
    random = np.random.default_rng([20260101, BAGS[case]])
    features = []
    for start, rows in zip(offsets(), sizes(), strict=True):
        weights = np.cumsum(np.arange(1, rows + 1, dtype=float) ** -ZIPF)
        features.append((weights / weights[-1], start + random.permutation(rows)))  # hot rows are scattered
    for _ in range(NUM_BATCHES):
        ids = np.empty((BATCH, len(features), BAGS[case]), np.int64)
        for feature, (share, row) in enumerate(features):
            rank = np.searchsorted(share, random.random((BATCH, BAGS[case])))
            ids[:, feature] = row[np.minimum(rank, len(row) - 1)]
        yield ids


def features_of(batch):
    """A batch as an array `(BATCH, bag)` for each feature."""
    return [np.ascontiguousarray(batch[:, feature]) for feature in range(batch.shape[1])]


def raw(row_numbers):
    """Ids as a user has them: any 64 bits."""
    return np.ascontiguousarray((row_numbers.astype(np.uint64) * ODD).view(np.int64))


def scattered(start, count, seed=0):
    """Raw ids of rows `start` to `start + count` in an order of their own."""
    return raw(start + np.random.default_rng([seed, start]).permutation(count))


# ---- measuring


def in_own_process(function, *arguments, backend=None):
    """`function(*arguments)` in a fresh process, whose Keras runs on `backend`; None: it does not matter on which.

    A live command has one process, and so one backend.
    """
    os.environ["KERAS_BACKEND"] = backend or BACKENDS[0]
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    if turns.is_live():
        own = sys.modules["keras"].backend.backend() if "keras" in sys.modules else backend
        if backend not in (None, own):
            raise ValueError(f"A live command measures one backend: set BACKENDS. Received: {backend} after {own}")
        return function(*arguments)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


# Numbers the calls of `in_turns`, because a live command may print the same step names in several.
_measurements = itertools.count(1)


def in_turns(steps, rounds, runs, warm_up=NUM_BATCHES):
    """Milliseconds of each of `steps`, `{name: step(number)}`: the median of `runs`, a list over `rounds`.

    The steps take turns, so that all meet the same neighbours on the machine.
    """
    numbers, measurement = dict.fromkeys(steps, 0), next(_measurements)

    def run(name):
        start = time.perf_counter()
        steps[name](numbers[name])
        numbers[name] += 1
        return (time.perf_counter() - start) * 1e3

    for name in steps:
        for _ in range(warm_up):
            run(name)
    times = {name: [] for name in steps}
    for _ in turns.turns(rounds):
        for name in steps:
            times[name].append(statistics.median(run(name) for _ in range(runs)))
        if turns.is_live():
            rows = [[f"{name}, measurement {measurement}", f"{of_step[-1]:.3f}"] for name, of_step in times.items()]
            print(table(["step", "ms"], rows))
    return times


def ratio(times, others):
    """Median over rounds of the ratio, and its range, as cells of a table."""
    ratios = sorted(t / o for t, o in zip(times, others, strict=True))
    return [f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}-{ratios[-1]:.2f}"]


def ms(times):
    """Median over rounds, as a cell of a table."""
    return f"{statistics.median(times):.2f}"


def memory_bytes(name, of="self"):
    """A field of /proc/PID/status: `"VmRSS"` resident now, `"VmHWM"` at most."""
    text = Path(f"/proc/{of}/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


# ---- the report


def parser(about, rounds=3, runs=5):
    """Options of every bench. `runs` are the steps of a round."""
    options = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=rounds)
    options.add_argument("--runs", type=int, default=runs, help="steps of a round")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--output", type=Path, help="a Markdown file for the result")
    return options


def table(columns, rows):
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def report(title, arguments, *parts):
    """Prints parts, paragraphs and tables, under a title and what they were measured on; writes them to `--output` too."""
    measured = (
        f"{datetime.date.today()}, commit {_commit()}, {_cpu()}, {arguments.threads} threads, {arguments.rounds} rounds of "
        f"{arguments.runs} runs, load average {os.getloadavg()[0]:.1f} at the end."
    )
    text = "\n\n".join([f"# {title}", measured, *parts]) + "\n"
    if not turns.is_live():
        print(text)
    if arguments.output:
        arguments.output.write_text(text)


def _commit():
    if commit := os.environ.get("SOK_COMMIT"):  # of a packed folder
        return commit
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def _cpu():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
