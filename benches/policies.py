"""A training step over tables with policies, beside the same step over tables that grow.

    make bench                              # or: python benches/policies.py [--rounds 5] [--threads 2]

Work: 26 features x 16,384 samples, one id each, dim 64, Adam, Zipf 1.05, as in `benches/step.py`. In each step, 1 % of the ids of the
tables with at least 65,536 rows are new. Tables with an eviction policy have room for the rows that they begin with, so they remove rows to
make room for the new ones. An admission policy counts the new ids, and keeps them out. Rows with a time to live stay
for 400 steps, so that each step examines a 64th of them. Update modes other than "local" let all rows take each step: "global" at once,
"lazy_global" when they are read. Steps take turns; a cell is the median over rounds.
"""

import numpy as np

import work
from native_step import NativeStep, native

DIM, LARGE, NEW = 64, 65_536, 0.01
LIFETIME = 400
EVICTION = {"counts_inference": False, "keeps_evicted": False}
POLICIES = {
    "none": {},
    "lru": {"eviction": {"score": "lru", **EVICTION}},
    "lfu": {"eviction": {"score": {"lfu": {"half_life": None}}, **EVICTION}},
    "custom": {"eviction": {"score": "custom", **EVICTION}},
    "frequency": {"admission": {"frequency": {"threshold": 3}}},
    "frequency, 1,000 counts": {"admission": {"frequency": {"threshold": 3, "memory": 64_000}}},
    "time to live": {"time_to_live": {"lifetime": {"steps": LIFETIME}}},
    "lazy_global": {},
    "global": {},
}


def batches(count):
    """Yields batches of row numbers. New ids come in one batch alone."""
    bases, random = list(work.batches("onehot")), np.random.default_rng(0)
    large = np.flatnonzero(np.array(work.sizes()) >= LARGE)
    num_new = int(work.BATCH * NEW)
    first_new = work.VOCABULARY
    for number in range(count):
        batch = bases[number % len(bases)].copy()
        for feature in large:
            places = random.choice(work.BATCH, num_new, replace=False)
            batch[places, feature, 0] = first_new + np.arange(num_new)
            first_new += num_new
        yield batch


def make_step(name, policy, num_steps):
    limits = [policy] * len(work.sizes())
    if "eviction" in policy:
        # Small tables have room for any batch.
        limits = [{"max_capacity": max(size, 2 * work.BATCH), **policy} for size in work.sizes()]
    mode = name if "global" in name else "local"
    step = NativeStep(len(work.sizes()), DIM, "adam", limits=limits, scores=name == "custom", mode=mode)
    step.fill(work.sizes())
    step.take(map(work.features_of, batches(num_steps)))
    return step


def main():
    arguments = work.parser(__doc__, rounds=5, runs=7).parse_args()
    native.set_num_threads(arguments.threads)
    num_steps = work.NUM_BATCHES + arguments.rounds * arguments.runs
    steps = {name: make_step(name, policy, num_steps) for name, policy in POLICIES.items()}
    times = work.in_turns({name: step.run for name, step in steps.items()}, arguments.rounds, arguments.runs)
    rows = []
    for name, step in steps.items():
        _, _, filtered, evicted, expired, _ = np.sum([table.stats(True)[2] for table in step.tables], axis=0)
        rows.append([name, work.ms(times[name]), *work.ratio(times[name], times["none"]), evicted + expired, filtered])
    table = work.table(["policy", "ms", "over none", "range", "rows removed", "ids kept out"], rows)
    work.report("A training step over tables with policies", arguments, table)


if __name__ == "__main__":
    main()
