"""What a table of a fifth of the keys keeps of ids by Zipf's law: the share of the ids for which it has a row.

    make bench                              # or: python benches/kept.py [--keys 50000] [--ids 5000000] [--batch 1000]

Key k is drawn where k + 1 is the whole part of a number with the density x^-1.05 between 1 and `keys + 1`. "of the best" divides by the
share of the keys that are drawn most often. "of those seen" divides by that of the keys that came most often: no policy knows more.
`--keys 32000000 --ids 100000000 --batch 65536` takes five minutes.
"""

import numpy as np

import work
from native_step import NativeStep

POWER, FIFTH = 1.0 - 1.05, 5
EVICTION = {"counts_inference": False, "keeps_evicted": False}
POLICIES = {
    "LFU": {"eviction": {"score": {"lfu": {"half_life": None}}, **EVICTION}},
    "LRU": {"eviction": {"score": "lru", **EVICTION}},
}


def share_below(x, num_keys):
    """Returns the share of the ids whose number is below x."""
    return (np.power(x, POWER) - 1) / ((num_keys + 1) ** POWER - 1)


def batches(num_keys, num_ids, size):
    """Yields numbers of keys `(size, 1)`."""
    random = np.random.default_rng(5)
    for _ in range(num_ids // size):
        most = (num_keys + 1) ** POWER - 1
        x = np.power(1 + random.random(size) * most, 1 / POWER)
        yield np.minimum(x.astype("int64"), num_keys)[:, None] - 1


def kept_by(policy, num_keys, num_ids, size):
    """Returns the numbers of the keys that a table has after training."""
    capacity = num_keys // FIFTH
    step = NativeStep(1, 1, "sgd", size, [{"max_capacity": capacity, **policy}])
    for number, batch in enumerate(batches(num_keys, num_ids, size)):
        step.take([[batch]])
        step.run(number)
    keys = step.tables[0].keys()
    # `work.raw` scatters keys, so that their order is not that of their shares.
    numbers = np.arange(num_keys)
    return numbers[np.isin(work.raw(numbers), keys)]


def most_seen(num_keys, num_ids, size):
    counts = np.zeros(num_keys, "int64")
    for batch in batches(num_keys, num_ids, size):
        np.add.at(counts, batch[:, 0], 1)
    return np.argsort(-counts, kind="stable")[: num_keys // FIFTH]


def main():
    parser = work.parser(__doc__)
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--ids", type=int, default=5_000_000)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument(
        "--thresholds", type=int, nargs="+", default=[1, 2, 10], help="of Frequency; 1: no admission policy"
    )
    arguments = parser.parse_args()
    given = arguments.keys, arguments.ids, arguments.batch

    def share(numbers):
        return np.sum(share_below(numbers + 2.0, given[0]) - share_below(numbers + 1.0, given[0]))

    best, seen = share_below(given[0] // FIFTH + 1.0, given[0]), share(most_seen(*given))
    rows = [["the most frequent of those seen", "", f"{seen / best:.1%}", "100.0%"]]
    for name, policy in POLICIES.items():
        for threshold in arguments.thresholds:
            admission = {"frequency": {"threshold": threshold}} if threshold > 1 else None
            kept = kept_by({**policy, "admission": admission}, *given)
            how = "all" if admission is None else f"come {threshold} times"
            rows.append([name, how, f"{share(kept) / best:.1%}", f"{share(kept) / seen:.1%}"])
    table = work.table(["rows that are kept", "ids that get a row", "of the best", "of those seen"], rows)
    title = f"What a fifth of {given[0]:,} keys keeps after {given[1]:,} ids"
    work.report(title, arguments, table)


if __name__ == "__main__":
    main()
