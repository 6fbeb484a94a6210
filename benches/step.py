"""A training step over our tables against a C program that only gathers and updates plain arrays, in one run.

    make bench                              # or: python benches/step.py [--rounds 5] [--threads 2]

Work: 26 features x 16,384 samples, one id each ("onehot") or bags of 8 summed ("bag8"), vocabulary 1,737,710 in all with the
cardinalities of Criteo's features, Zipf 1.05, four batches in turn; all ids are in the tables, inserted in a scattered order.
Ours runs the entry points that the bridges call: lookup, push, commit, apply; "held": the gradients stay where they are until
apply, "merged": they are merged at push. The two programs take turns, so that both meet the same neighbours; a cell is the median
over rounds of ours / limit.
"""

import itertools
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import work
from native_step import criteo_step, native


def main():
    arguments = work.parser(__doc__, rounds=5, runs=7).parse_args()
    native.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in work.BAGS:
            for number, batch in enumerate(work.batches(case)):
                batch.tofile(folder / f"{case}_{number}.i64")
        with Limit(folder, arguments) as limit:
            cases = itertools.product(work.BAGS, (16, 64), ("fwd", "sgd", "adam"))
            rows = [row for case in cases for row in rows_of(*case, limit, arguments)]
    columns = ["case", "dim", "step", "gradient", "limit ms", "ours ms", "ours / limit", "range"]
    work.report("A training step against plain arrays in C", arguments, work.table(columns, rows))


class Limit:
    """The C program, which waits between its turns."""

    def __init__(self, folder, arguments):
        program, source = folder / "limit", Path(__file__).with_name("limit.c")
        flags = ["-O3", "-march=native", "-ffast-math", "-pthread"]
        subprocess.run(["gcc", *flags, source, "-o", program, "-lm"], check=True)
        self._command = [program, folder, str(arguments.threads), str(arguments.runs), str(work.VOCABULARY)]

    def __enter__(self):
        self._program = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error):
        self._program.stdin.close()
        self._program.wait()

    def ms(self, case, dim, mode):
        self._program.stdin.write(f"{case} {dim} {mode}\n")
        self._program.stdin.flush()
        return float(self._program.stdout.readline())


def rows_of(case, dim, mode, limit, arguments):
    step = criteo_step(case, dim, "adam" if mode == "fwd" else mode)
    ways = ("fwd",) if mode == "fwd" else ("held", "merged")
    ours, limits = {way: [] for way in ways}, []
    for _ in range(arguments.rounds):
        limits.append(limit.ms(case, dim, mode))
        for way, times in work.in_turns({w: partial(step.run, way=w) for w in ways}, 1, arguments.runs).items():
            ours[way] += times
    for way in ways:
        cells = [case, dim, mode, "-" if way == "fwd" else way]
        yield [*cells, work.ms(limits), work.ms(ours[way]), *work.ratio(ours[way], limits)]


if __name__ == "__main__":
    main()
