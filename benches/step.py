"""A training step over our tables against a C program that only gathers and updates plain arrays, in one run.

    make bench                              # or: python benches/step.py [--rounds 5] [--threads 2]

Work: 26 features x 16,384 samples, one id each ("onehot") or bags of 8 summed ("bag8"), vocabulary 1,737,710 in all with the
cardinalities of Criteo's features, Zipf 1.05, four batches in turn; all ids are in the tables, inserted in a scattered order.
Ours runs the entry points that the bridges call: lookup, push, commit, apply; "held": the gradients stay where they are until
apply, "merged": they are merged at push. The two programs take turns, so that both meet the same neighbours; a cell is the median
over rounds of ours / limit.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import numpy as np

from sok_keras.backend import native

# Cardinalities of Criteo Kaggle's features, cut so that their sum is VOCABULARY.
CARDINALITIES = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194]
CARDINALITIES += [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
VOCABULARY, BATCH, ZIPF, NUM_BATCHES = 1_737_710, 16_384, 1.05, 4
BAGS = {"onehot": 1, "bag8": 8}
# Raw ids are row numbers times this: they look like hashes.
ODD = np.uint64(0xA24BAED4963EE407)
RULES = {
    "sgd": {"name": "sgd", "momentum": 0.0, "nesterov": False},
    "adam": {"name": "adam", "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
}


def sizes():
    """Rows of each table."""
    low, high = 1, max(CARDINALITIES)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(c, middle) for c in CARDINALITIES) <= VOCABULARY else (low, middle - 1)
    rows = np.array([min(c, low) for c in CARDINALITIES])
    rows[np.argmax(CARDINALITIES)] += VOCABULARY - rows.sum()
    return rows


def make_batches(folder):
    """Writes `{case}_{number}.i64`: row numbers `(BATCH, 26, bag)` int64, offset of the table added."""
    random = np.random.default_rng(20260101)
    rows = sizes()
    offsets = np.concatenate([[0], np.cumsum(rows)])
    weights = [np.cumsum(np.arange(1, n + 1, dtype=float) ** -ZIPF) for n in rows]
    order = [random.permutation(n) for n in rows]  # hot rows are scattered
    for case, bag in BAGS.items():
        for number in range(NUM_BATCHES):
            ids = np.empty((BATCH, len(rows), bag), np.int64)
            for feature, (total, permuted) in enumerate(zip(weights, order, strict=True)):
                rank = np.searchsorted(total, random.random((BATCH, bag)) * total[-1])
                ids[:, feature] = offsets[feature] + permuted[np.minimum(rank, len(permuted) - 1)]
            ids.tofile(folder / f"{case}_{number}.i64")


def address(array):
    dtypes = {"int32": 0, "int64": 1, "float32": 4}
    return array.ctypes.data, dtypes[array.dtype.name], list(array.shape)


def raw(row_numbers):
    return np.ascontiguousarray((row_numbers.astype(np.uint64) * ODD).view(np.int64))


class Step:
    """26 tables and all that a step needs."""

    def __init__(self, folder, case, dim, mode):
        bag, rows = BAGS[case], sizes()
        config = {
            "dim": dim,
            "vocabulary_size": None,
            "initializer": {"kind": "uniform", "minval": -0.05, "maxval": 0.05},
            "seed": 1,
            "missing": "initial",
            "out_of_vocabulary": "raise",
            "initial_capacity": 0,
            "max_capacity": None,
            "check_mode": "raise",
        }
        self.mode = mode
        self.group = native.Group([json.dumps({"name": f"t{t}", **config}) for t in range(len(rows))])
        features = [(f"f{t}", t, False, "last", False, "sum", None) for t in range(len(rows))]
        self.plan = native.Plan(self.group, features)
        rule = RULES["adam" if mode == "fwd" else mode]
        update = {"rule": rule, "weight_decay": None, "clipvalue": None, "clipnorm": None}
        self.optimizer = native.Optimizer([self.group], [json.dumps(update)], False)
        random, start = np.random.default_rng(0), 0
        for number, count in enumerate(rows):
            native.Table(self.group, number).find_or_insert(raw(start + random.permutation(count)))
            start += count
        self.ids = []
        for number in range(NUM_BATCHES):
            ids = np.fromfile(folder / f"{case}_{number}.i64", np.int64).reshape(BATCH, len(rows), bag)
            self.ids.append([raw(ids[:, t]) for t in range(len(rows))])
        self.number, self.scalar = np.zeros(2, "int32"), np.zeros((), "float32")
        self.rows = [np.zeros((BATCH, dim), "float32") for _ in rows]
        self.gradients = [random.normal(size=(BATCH, dim)).astype("float32") * 1e-3 for _ in rows]
        self.ticket, self.trigger, self.new = (np.zeros((64, 2), "float32") for _ in range(3))

    def run(self, number, keep):
        """Seconds of one step."""
        ids = [address(i) for i in self.ids[number % NUM_BATCHES]]
        outputs = [address(self.number), *map(address, self.rows)]
        trains = self.mode != "fwd"
        start = time.perf_counter()
        native.lookup(self.plan.handle, trains, trains, ids, outputs)
        if trains:
            pushed = [address(self.number), *map(address, self.gradients)]
            native.push(self.plan.handle, pushed, keep, [address(self.ticket)])
            update, scalars = np.ones(1, "float32"), np.array([1e-3, number + 1, 1, 1], "float32")
            native.commit(self.optimizer.handle, [address(update), address(self.ticket)], [address(self.scalar)])
            applied = [address(scalars), address(self.scalar), address(self.trigger)]
            native.apply(self.optimizer.handle, applied, [address(self.new)])
        return time.perf_counter() - start


def our_times(folder, runs):
    """Median milliseconds by (case, dim, mode, way)."""
    times = {}
    for case in BAGS:
        for dim in (16, 64):
            for mode in ("fwd", "sgd", "adam"):
                step = Step(folder, case, dim, mode)
                for way, keep in (("held", object()), ("merged", None)) if mode != "fwd" else (("held", None),):
                    taken = [step.run(number, keep) for number in range(NUM_BATCHES + runs)][NUM_BATCHES:]
                    times[case, dim, mode, way] = statistics.median(taken) * 1e3
    return times


def limit_times(program, folder, threads, runs):
    text = subprocess.run(
        [program, folder, str(threads), str(runs), str(VOCABULARY)], check=True, capture_output=True, text=True
    )
    lines = (line.split() for line in text.stdout.splitlines())
    return {(case, int(dim), mode): float(ms) for case, dim, mode, ms in lines}


def table_of(rounds):
    """The result as Markdown: ms of both, ratio and its range."""
    lines = [
        "| case | dim | step | gradient | limit ms | ours ms | ours / limit | range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in rounds[0][1]:
        case, dim, mode, way = key
        limits = [limit[case, dim, mode] for limit, _ in rounds]
        ours = [times[key] for _, times in rounds]
        ratios = sorted(o / b for o, b in zip(ours, limits, strict=True))
        way = "-" if mode == "fwd" else way
        lines.append(
            f"| {case} | {dim} | {mode} | {way} | {statistics.median(limits):.2f} | {statistics.median(ours):.2f} "
            f"| {statistics.median(ratios):.2f} | {ratios[0]:.2f}-{ratios[-1]:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=7, help="steps a measurement")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a Markdown file for the result")
    arguments = parser.parse_args()
    native.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "limit"
        source = Path(__file__).with_name("limit.c")
        subprocess.run(
            ["gcc", "-O3", "-march=native", "-ffast-math", "-pthread", source, "-o", program, "-lm"], check=True
        )
        make_batches(folder)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(
                (limit_times(program, folder, arguments.threads, arguments.runs), our_times(folder, arguments.runs))
            )
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    text = (
        f"# A training step against plain arrays in C\n\n{datetime.date.today()}, commit {commit}, {cpu}, {arguments.threads} threads, "
        f"{arguments.rounds} rounds of {arguments.runs} steps, load average {os.getloadavg()[0]:.1f} at the end.\n\n{table_of(rounds)}\n"
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
