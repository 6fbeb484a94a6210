"""How a step's cost changes with the number of tables and of threads.

    python benches/scaling.py

The whole native step with Adam. Tables: 200 with 256 ids each against one with the same 51,200 ids, of 10,000 rows each and
2,000,000 in all. Threads: two against one on bags of 8 of step.py's batches.
"""

import numpy as np

import work

NUM_TABLES, TABLE_IDS, TABLE_ROWS = 200, 256, 10_000


def main():
    arguments = work.parser(__doc__, rounds=5, runs=7).parse_args()
    tables = [work.in_own_process(many_tables, dim, arguments) for dim in (16, 64)]
    threads = [work.in_own_process(two_threads, dim, arguments) for dim in (16, 64)]
    work.report(
        "Many tables, two threads",
        arguments,
        work.table(["dim", "200 tables ms", "one table ms", "200 / one", "range"], tables),
        work.table(["dim", "one thread ms", "two threads ms", "one / two", "range"], threads),
    )


def many_tables(dim, arguments):
    from native_step import NativeStep, native

    native.set_num_threads(arguments.threads)
    many, one = NativeStep(NUM_TABLES, dim, samples=TABLE_IDS), NativeStep(1, dim, samples=NUM_TABLES * TABLE_IDS)
    many.fill([TABLE_ROWS] * NUM_TABLES)
    one.fill([TABLE_ROWS * NUM_TABLES])
    random = np.random.default_rng(0)
    first_rows = TABLE_ROWS * np.arange(NUM_TABLES)[:, None, None]
    batches = first_rows + random.integers(0, TABLE_ROWS, (work.NUM_BATCHES, NUM_TABLES, TABLE_IDS, 1))
    many.take(batches)
    one.take(batches.reshape(work.NUM_BATCHES, 1, -1, 1))
    times = work.in_turns({"many": many.run, "one": one.run}, arguments.rounds, arguments.runs)
    return [dim, *map(work.ms, times.values()), *work.ratio(*times.values())]


def two_threads(dim, arguments):
    from native_step import criteo_step, native

    step = criteo_step("bag8", dim)

    def with_threads(threads):
        def run(number):
            native.set_num_threads(threads)
            step.run(number)

        return run

    times = work.in_turns({"one": with_threads(1), "two": with_threads(2)}, arguments.rounds, arguments.runs)
    return [dim, *map(work.ms, times.values()), *work.ratio(*times.values())]


if __name__ == "__main__":
    main()
