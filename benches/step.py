"""A training step over our tables against a C program that only gathers and updates plain arrays, in one run.

    make bench                              # or: python benches/step.py [--rounds 5] [--threads 2]

Work: 26 features x 16,384 samples, one id each ("onehot") or bags of 8 summed ("bag8"), vocabulary 1,737,710 in all with the
cardinalities of Criteo's features, Zipf 1.05, four batches in turn; all ids are in the tables, inserted in a scattered order.
Ours runs the entry points that the bridges call: lookup, push, commit, apply; "held": the gradients stay where they are until
apply, "merged": they are merged at push. The two programs take turns, so that both meet the same neighbours; a cell is the median
over rounds of ours / limit.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import work
from native_step import criteo_step, native


def main():
    arguments = work.parser(__doc__, runs=7).parse_args()
    native.set_num_threads(arguments.threads)
    rounds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build_limit(folder)
        for case in work.BAGS:
            for number, batch in enumerate(work.batches(case)):
                batch.tofile(folder / f"{case}_{number}.i64")
        for number in range(arguments.rounds):
            rounds.append((limit_times(program, folder, arguments), our_times(arguments.runs)))
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
    columns = ["case", "dim", "step", "gradient", "limit ms", "ours ms", "ours / limit", "range"]
    work.report("A training step against plain arrays in C", arguments, work.table(columns, rows_of(rounds)))


def build_limit(folder):
    program, source = folder / "limit", Path(__file__).with_name("limit.c")
    flags = ["-O3", "-march=native", "-ffast-math", "-pthread"]
    subprocess.run(["gcc", *flags, source, "-o", program, "-lm"], check=True)
    return program


def limit_times(program, folder, arguments):
    """Milliseconds by (case, dim, mode)."""
    command = [program, folder, str(arguments.threads), str(arguments.runs), str(work.VOCABULARY)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line.split() for line in text.splitlines())
    return {(case, int(dim), mode): float(ms) for case, dim, mode, ms in lines}


def our_times(runs):
    """Milliseconds by (case, dim, mode, way)."""
    times = {}
    for case in work.BAGS:
        for dim in (16, 64):
            for mode in ("fwd", "sgd", "adam"):
                step = criteo_step(case, dim, "adam" if mode == "fwd" else mode)
                ways = ("fwd",) if mode == "fwd" else ("held", "merged")
                for way, (time,) in work.in_turns({w: partial(step.run, way=w) for w in ways}, 1, runs).items():
                    times[case, dim, mode, way] = time
    return times


def rows_of(rounds):
    for case, dim, mode, way in rounds[0][1]:
        limits = [limit[case, dim, mode] for limit, _ in rounds]
        ours = [times[case, dim, mode, way] for _, times in rounds]
        cells = [case, dim, mode, "-" if way == "fwd" else way]
        yield [*cells, work.ms(limits), work.ms(ours), *work.ratio(ours, limits)]


if __name__ == "__main__":
    main()
