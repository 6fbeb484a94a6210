"""Steps that look for rows whose time to live is over, and remove them.

    make bench                              # or: python benches/expiry.py [--rows 16777216]

Work: one table of dim 4; a step trains 64 of its rows, so that nearly all its time is that of the sweep at its end. A cycle of 4,096 steps
examines all rows. In the first cycle no row is old enough, in the second one all others go. Steps that examine no rows are left out: seven
of eight.
"""

import time

import numpy as np

import work
from native_step import NativeStep

DIM, SAMPLES, CYCLE, PARTS = 4, 64, 4096, 512
LIFETIME = 4 * CYCLE
KINDS = {"": False, ", kept until they are taken": True}


def times_of(step, first, count):
    """Returns the milliseconds of each of `count` steps."""
    times = np.empty(count)
    for at in range(count):
        start = time.perf_counter()
        step.run(first + at)
        times[at] = 1e3 * (time.perf_counter() - start)
    return times


def main():
    parser = work.parser(__doc__)
    parser.add_argument("--rows", type=int, default=2**24)
    arguments = parser.parse_args()
    rows = []
    for kind, keeps in KINDS.items():
        limit = {"time_to_live": {"lifetime": {"steps": LIFETIME}, "keeps_expired": keeps}}
        step = NativeStep(1, DIM, "sgd", SAMPLES, [limit])
        step.fill([arguments.rows])
        step.take([[np.arange(SAMPLES).reshape(SAMPLES, 1)]])
        times_of(step, 0, LIFETIME - CYCLE)
        for what, first in [("none", LIFETIME - CYCLE), (f"all{kind}", LIFETIME)]:
            before = step.tables[0].stats(True)[2][4]
            times = np.sort(times_of(step, first, CYCLE))[-PARTS:]
            gone = (step.tables[0].stats(True)[2][4] - before) // PARTS
            rows.append([what, gone, f"{np.median(times):.2f}", f"{np.quantile(times, 0.98):.2f}", f"{times[-1]:.2f}"])
    table = work.table(["rows that expire", "rows in a step", "median ms", "98 %", "highest"], rows)
    work.report(f"Sweeps for expired rows of {arguments.rows:,} rows", arguments, table)


if __name__ == "__main__":
    main()
