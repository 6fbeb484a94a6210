"""What a model loses whose tables keep fewer rows, or smaller ones: AUC, rows and bytes beside tables that keep all ids as float32.

    KERAS_BACKEND=jax python benches/auc.py [--ratings FILE] [--days 5] [--clicks 100000] [--drift 0.1] [--output FILE]

Without --ratings: DeepFM of examples/criteo_deepfm.py on made clicks. Each day brings other clicks, and replaces a tenth of the ids of a
column. With --ratings: a file with a line `user item` for each rating, in each user's order of time. Users begin and end together, and the
time is cut into days of equally many ratings. A model predicts the next item of a user from that before; each rating comes with an item that is
drawn from all. A model predicts the samples of a day before it trains on them; the AUC is that of all days but the first.

A table's capacity is a share of all its ids, at least of those of two batches. "first come": the table refuses new ids as soon as it is full.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np

import criteo
import sok_keras as sok
import work
from criteo_deepfm import LEARNING_RATE, ROW_DIM, SEED, build_model, feature_name, initializer, predict

TOWER, BATCH, RATING_DIM = [128, 128], 512, 16
SHARES = (0.5, 0.25, 0.1)
EVICTIONS = {
    "first come": None,
    "lru": "lru",
    "lfu": "lfu",
    "lfu, half-life of 100 steps": sok.policies.LFU(half_life=100),
}


class Clicks:
    """Made clicks of some days, and DeepFM."""

    def __init__(self, arguments):
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"day_{day}.tsv" for day in range(arguments.days)]
            for day, path in enumerate(paths):
                criteo.make(path, arguments.clicks, day=day, drift=arguments.drift)
            read = [criteo.read(path) for path in paths]
        self.days = [([dense, ids], label) for dense, ids, label in read]
        ids = np.concatenate([ids for _, ids, _ in read])
        self.num_ids = [len(np.unique(ids[:, column])) for column in range(criteo.NUM_CATEGORICAL)]
        self.about = f"{arguments.days} days of {arguments.clicks} clicks, drift {arguments.drift}, 26 columns"

    def model(self, options):
        def embed(ids):
            features, columns = {}, {}
            for column, num_ids in enumerate(self.num_ids):
                table = sok.TableConfig(
                    feature_name(column),
                    None,
                    ROW_DIM,
                    initializer=initializer(column),
                    combiner="sum",
                    seed=SEED + column,
                    **options(num_ids),
                )
                features[table.name] = sok.FeatureConfig(table.name, table)
                columns[table.name] = ids[:, column : column + 1]
            rows = sok.DistributedEmbedding(features, name="embeddings")(columns)
            return keras.ops.stack(list(rows.values()), axis=1)

        return build_model(embed, TOWER, sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE)))


class Ratings:
    """Ratings of items by users, and a model that predicts a user's next item."""

    def __init__(self, arguments):
        users, items = np.loadtxt(arguments.ratings, dtype="int64").T
        starts = np.flatnonzero(np.r_[True, users[1:] != users[:-1]])
        lengths = np.diff(np.r_[starts, len(users)])
        place = np.arange(len(users)) - np.repeat(starts, lengths)
        time = place / np.repeat(lengths, lengths)
        order = np.argsort(time + np.random.default_rng(1).random(len(users)) * 1e-3)
        order = order[place[order] > 0]
        random = np.random.default_rng(2)
        ids = np.stack([users, np.r_[items[0], items[:-1]], items], axis=1)[order]
        drawn = np.where(np.arange(3) == 2, random.integers(items.min(), items.max() + 1, (len(ids), 1)), ids)
        samples = np.stack([ids, drawn], axis=1).reshape(-1, 3)
        labels = np.tile(np.array([1, 0], "float32"), len(ids))
        self.days = [
            (x, y)
            for x, y in zip(
                np.array_split(samples, arguments.days), np.array_split(labels, arguments.days), strict=True
            )
        ]
        self.num_ids = [len(np.unique(column)) for column in (samples[:, 0], samples[:, 1:])]
        self.about = f"{arguments.days} days of {len(samples) // arguments.days} samples, users and items"

    def model(self, options):
        keras.utils.set_random_seed(SEED)
        ids = keras.Input((3,), dtype="int64")
        tables = [
            sok.TableConfig(
                name, None, RATING_DIM, initializer=initializer(number), seed=SEED + number, **options(num_ids)
            )
            for number, (name, num_ids) in enumerate(zip(("users", "items"), self.num_ids, strict=True))
        ]
        features = {
            name: sok.FeatureConfig(name, table)
            for name, table in (("user", tables[0]), ("before", tables[1]), ("next", tables[1]))
        }
        columns = {name: ids[:, number : number + 1] for number, name in enumerate(features)}
        rows = sok.DistributedEmbedding(features, name="embeddings")(columns)
        context = keras.layers.Dense(RATING_DIM)(keras.ops.concatenate([rows["user"], rows["before"]], axis=-1))
        both = keras.ops.concatenate([context, rows["next"], context * rows["next"]], axis=-1)
        hidden = keras.layers.Dense(64, activation="relu")(both)
        model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE)), "binary_crossentropy")
        return model


def limits(share, eviction):
    """The options of a table with room for a share of its ids."""

    def options(num_ids):
        capacity = max(int(share * num_ids), min(num_ids, 2 * BATCH))
        return {"max_capacity": capacity, "eviction": eviction, "check_mode": "count"}

    return options


def cases(steps_a_day):
    """Yields what tables keep, and the options of a table with so many ids."""
    yield "all ids", lambda _: {}
    for dtype in ("bfloat16", "float16"):
        for stochastic in (False, True):
            options = {"embedding_dtype": dtype, "stochastic_rounding": stochastic}
            yield dtype + (", rounded by chance" if stochastic else ""), lambda _, options=options: options
    for n in (2, 3, 5):
        yield f"ids that came {n} times", lambda _, n=n: {"admission": sok.policies.Frequency(n)}
    yield "ids with probability 0.3", lambda _: {"admission": sok.policies.Probability(0.3)}
    for days in (2, 1, 0.5):
        steps = int(days * steps_a_day)
        yield f"time to live of {days} days", lambda _, steps=steps: {"time_to_live": steps}
    for share in SHARES:
        for name, eviction in EVICTIONS.items():
            yield f"{share:.0%} of the ids, {name}", limits(share, eviction)
    together = {
        "admission": sok.policies.Frequency(2),
        "time_to_live": int(steps_a_day),
        "embedding_dtype": "bfloat16",
    }
    yield "ids that came twice, time to live of 1 day, bfloat16", lambda _: together


def run(data, options):
    """Returns the AUC, and rows and bytes of all tables in the end."""
    model, predictions = data.model(options), []
    for number, (inputs, labels) in enumerate(data.days):
        if number:
            predictions.append(predict(model, inputs))
        model.fit(inputs, labels, BATCH, verbose=0, shuffle=False)
    labels = np.concatenate([labels for _, labels in data.days[1:]])
    stats = [table.stats() for table in model.get_layer("embeddings").get_tables().values()]
    sums = [sum(getattr(each, name) for each in stats) for name in ("size", "bytes")]
    return criteo.auc(labels, np.concatenate(predictions)), *sums


def main():
    parser = work.parser(__doc__, rounds=1, runs=1)
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--clicks", type=int, default=100_000, help="clicks a day")
    parser.add_argument("--drift", type=float, default=0.1)
    parser.add_argument("--ratings", type=Path)
    arguments = parser.parse_args()
    data = Ratings(arguments) if arguments.ratings else Clicks(arguments)
    rows, best = [], None
    for name, options in cases(len(data.days[0][1]) / BATCH):
        auc, size, num_bytes = run(data, options)
        best = auc if best is None else best
        rows.append([name, f"{auc:.4f}", f"{auc - best:+.4f}", size, f"{num_bytes / 1e6:.1f}"])
        print(rows[-1], flush=True)
    table = work.table(["what tables keep", "AUC", "beside all ids", "rows", "MB"], rows)
    about = f"{data.about} of {sum(data.num_ids)} ids in all, batches of {BATCH}, Adam, {keras.backend.backend()}."
    work.report("AUC of tables that keep fewer or smaller rows", arguments, about, table)


if __name__ == "__main__":
    main()
