"""Trains one model on several ranks, a process and a device each: retrieval ids that nobody has counted, in tables that all share.

    python -m sok_keras.launch -n 2 examples/multi_gpu.py                 # on one host, with nothing else installed
    torchrun --nproc-per-node 2 examples/multi_gpu.py                     # the same under torchrun, mpirun or srun
    python examples/multi_gpu.py --global-batch-size 512                  # one process: the same batches, the same metrics

Every rank makes the same click log, and `sok.shard` gives it its part of each batch. After training all ranks write one dump, and
load it again: any other number of ranks could.
"""

import argparse
import os
import sys
import time

PROGRESS = 1 if sys.stdout.isatty() else 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--rows", type=int, default=100_000, help="clicks of the log")
    parser.add_argument("--global-batch-size", type=int, default=512, help="of all ranks together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--dump", default="data/multi_gpu.dump", help="where the ranks write the model; all must reach it"
    )
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    # Keras reads this when it is first imported.
    if arguments.backend:
        os.environ["KERAS_BACKEND"] = arguments.backend

# Without it JAX turns int64 ids into int32 ones.
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np

import sok_keras as sok

EMBEDDING_DIM = 16
SEED = 1


def main(arguments):
    sok.init()
    ids, labels = click_log(arguments.rows)
    num_held_out = arguments.rows // 5
    batch_size = arguments.global_batch_size // sok.world_size()
    train = sok.shard((ids[num_held_out:], labels[num_held_out:]), batch_size=batch_size, shuffle=True)
    held_out = sok.shard((ids[:num_held_out], labels[:num_held_out]), batch_size=batch_size)

    model = build_model()
    start = time.perf_counter()
    model.fit(train, epochs=arguments.epochs, callbacks=[sok.callbacks.Distributed()], verbose=PROGRESS)
    seconds = time.perf_counter() - start
    metrics = model.evaluate(held_out, callbacks=[sok.callbacks.Distributed()], verbose=0, return_dict=True)
    (layer,) = (layer for layer in model.layers if isinstance(layer, sok.DistributedEmbedding))
    num_rows = {name: len(table) for name, table in layer.get_tables().items()}  # all ranks ask, rank 0 prints

    sok.dump(arguments.dump, model)
    loaded = build_model()
    sok.load(arguments.dump, loaded)
    again = loaded.evaluate(held_out, callbacks=[sok.callbacks.Distributed()], verbose=0, return_dict=True)
    assert again == metrics
    if sok.rank() == 0:
        num_trained = arguments.epochs * (arguments.rows - num_held_out)
        print(
            f"ranks {sok.world_size()}, AUC {metrics['auc']:.4f}, {num_trained / seconds:,.0f} samples/s, rows {num_rows}"
        )


def build_model():
    """Returns a compiled model: ids of a user, an item and its category, int64 `(batch, 3)`, to clicks `(batch, 1)`."""
    keras.utils.set_random_seed(SEED)
    ids = keras.Input((3,), dtype="int64", name="ids")
    tables = [
        sok.TableConfig("user", None, EMBEDDING_DIM),  # by a hash of the id, over all ranks
        sok.TableConfig("item", None, EMBEDDING_DIM),
        sok.TableConfig("category", 100, EMBEDDING_DIM),  # small, so every rank has it
    ]
    embed = sok.DistributedEmbedding(
        {table.name: sok.FeatureConfig(table.name, table, (None,), (None, EMBEDDING_DIM)) for table in tables}
    )
    rows = embed({table.name: ids[:, column] for column, table in enumerate(tables)})
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(list(rows.values())))
    match = keras.layers.Dot(1)([rows["user"], rows["item"]])
    click = keras.ops.sigmoid(keras.layers.Dense(1)(hidden) + match)
    model = keras.Model(ids, click)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(2e-3))
    model.compile(optimizer, "binary_crossentropy", weighted_metrics=[keras.metrics.AUC(name="auc")])
    return model


def click_log(num_rows):
    """Returns ids, int64 `(num_rows, 3)`, and clicks, float32 `(num_rows, 1)`. A user clicks on items of a taste that both have."""
    draw = np.random.default_rng(SEED)
    users, items = draw.zipf(1.2, num_rows) % 5_000, draw.zipf(1.2, num_rows) % 20_000
    taste = np.sin(users * 12.9898) * np.sin(items * 78.233)
    clicks = draw.random(num_rows) < 1 / (1 + np.exp(-4 * taste))
    # Ids as logs have them: any 64-bit numbers.
    ids = np.stack([users * 0x4F1BBCDCBFA53E0B, items * 0x61595716EA25D3A7, items % 100], axis=1)
    return ids.astype("int64"), clicks.astype("float32")[:, None]


if __name__ == "__main__":
    main(arguments)
