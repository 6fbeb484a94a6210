"""What a model loses whose tables have room for a part of the ids alone: DeepFM of examples/criteo_deepfm.py on clicks that drift.

    KERAS_BACKEND=jax python benches/capacity.py [--days 5] [--clicks 100000] [--drift 0.1] [--output FILE]

Each day brings other clicks, and replaces a tenth of the ids of a column. A model predicts the clicks of a day before it trains on them;
the AUC is that of all days but the first. A column's table has room for a share of all its ids, at least for those of two batches.
"first come": the table refuses new ids as soon as it is full.
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

TOWER, BATCH = [128, 128], 512
SHARES = (0.5, 0.25, 0.1)
POLICIES = {
    "first come": None,
    "lru": "lru",
    "lfu": "lfu",
    "lfu, half-life of 100 steps": sok.policies.LFU(half_life=100),
}


def clicks(arguments):
    """Returns dense, ids and labels of each day."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"day_{day}.tsv" for day in range(arguments.days)]
        for day, path in enumerate(paths):
            criteo.make(path, arguments.clicks, day=day, drift=arguments.drift)
        return [criteo.read(path) for path in paths]


def make_model(capacities, eviction):
    """`capacities`: of each column's table; None for tables that grow."""

    def embed(ids):
        names = [feature_name(column) for column in range(criteo.NUM_CATEGORICAL)]
        limits = [{}] * len(names)
        if capacities is not None:
            limits = [{"max_capacity": n, "eviction": eviction, "check_mode": "count"} for n in capacities]
        tables = [
            sok.TableConfig(
                name,
                None,
                ROW_DIM,
                initializer=initializer(column),
                combiner="sum",
                seed=SEED + column,
                **limits[column],
            )
            for column, name in enumerate(names)
        ]
        features = {table.name: sok.FeatureConfig(table.name, table) for table in tables}
        columns = {name: ids[:, column : column + 1] for column, name in enumerate(names)}
        rows = sok.DistributedEmbedding(features, name="embeddings")(columns)
        return keras.ops.stack([rows[name] for name in names], axis=1)

    return build_model(embed, TOWER, sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE)))


def run(days, capacities, eviction):
    """Returns the AUC, and rows, removed rows and bytes of all tables in the end."""
    model, predictions = make_model(capacities, eviction), []
    for number, (dense, ids, label) in enumerate(days):
        if number:
            predictions.append(predict(model, [dense, ids]))
        model.fit([dense, ids], label, BATCH, verbose=0, shuffle=False)
    labels = np.concatenate([label for _, _, label in days[1:]])
    stats = [table.stats() for table in model.get_layer("embeddings").get_tables().values()]
    sums = [sum(getattr(each, name) for each in stats) for name in ("size", "evicted", "bytes")]
    return criteo.auc(labels, np.concatenate(predictions)), *sums


def main():
    parser = work.parser(__doc__, rounds=1, runs=1)
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--clicks", type=int, default=100_000, help="clicks a day")
    parser.add_argument("--drift", type=float, default=0.1)
    arguments = parser.parse_args()
    days = clicks(arguments)
    num_ids = [
        len(np.unique(np.concatenate([ids[:, column] for _, ids, _ in days])))
        for column in range(criteo.NUM_CATEGORICAL)
    ]
    best, *of_best = run(days, None, None)
    rows = [["all ids", "-", f"{best:.4f}", "-", of_best[0], 0, f"{of_best[2] / 1e6:.1f}"]]
    for share in SHARES:
        capacities = [max(int(share * count), min(count, 2 * BATCH)) for count in num_ids]
        for name, eviction in POLICIES.items():
            auc, size, evicted, num_bytes = run(days, capacities, eviction)
            rows.append(
                [f"{share:.0%}", name, f"{auc:.4f}", f"{auc - best:+.4f}", size, evicted, f"{num_bytes / 1e6:.1f}"]
            )
            print(rows[-1], flush=True)
    table = work.table(["room for", "when full", "AUC", "beside all ids", "rows", "rows removed", "MB"], rows)
    about = (
        f"{arguments.days} days of {arguments.clicks} clicks, 26 columns of {sum(num_ids)} ids in all, drift {arguments.drift}, batches of {BATCH}, "
        f"Adam, {keras.backend.backend()}."
    )
    work.report("AUC of tables with room for a part of the ids", arguments, about, table)


if __name__ == "__main__":
    main()
