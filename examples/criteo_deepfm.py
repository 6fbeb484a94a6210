"""Trains DeepFM on Criteo click logs, with ids as they stand in the file: no vocabulary, no hashing, no limit.

Each of the 26 categorical features has a table of its own, which grows by a row when an id is first trained on. After
training, the tables and the rest of the model are dumped, loaded into a fresh model, and both must predict the same.

    python examples/criteo_deepfm.py --backend jax                        # makes data/criteo_500000.tsv first
    python examples/criteo_deepfm.py --data day_0.tsv --tower 10x1024     # SparseOperationKit's demo tower
    python examples/criteo_deepfm.py --embedding keras                    # keras.layers.Embedding, ids counted first
    python -m sok_keras.launch -n 2 examples/criteo_deepfm.py             # two processes share the tables

The last 20 % of the rows are held out. One epoch is the default, as is usual for click logs: rare ids are learned by
heart in a second one.

References: Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", IJCAI 2017.
"""

import argparse
import math
import os
import sys
import time
from pathlib import Path

# Keras' progress bar in a terminal, one line for each epoch in a log.
PROGRESS = 1 if sys.stdout.isatty() else 2


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", type=Path, help="a Criteo file")
    source.add_argument("--rows", type=int, default=500_000, help="without --data: the size of a file to make")
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--embedding", choices=("sok", "keras"), default="sok")
    parser.add_argument("--tower", type=tower_shape, default="3x400", help="layers x units")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dump", type=Path, default=Path("data/criteo_deepfm.dump"), help="where sok writes the model")
    return parser.parse_args()


def tower_shape(text):
    """Returns the units of each layer: "3x400" gives [400, 400, 400]."""
    num_layers, num_units = text.split("x")
    return int(num_layers) * [int(num_units)]


if __name__ == "__main__":
    arguments = parse_arguments()
    # Keras reads this when it is first imported, so it must be known before.
    if arguments.backend:
        os.environ["KERAS_BACKEND"] = arguments.backend

# Without it JAX turns int64 ids into int32 ones. Keras' own numbers stay float32. (Where it cannot be set,
# `DistributedEmbedding.preprocess` splits ids into two int32 words on the host.)
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np

import criteo

EMBEDDING_DIM = 10
ROW_DIM = EMBEDDING_DIM + 1  # an id's first-order weight is the last column of its row
LEARNING_RATE = 2e-3  # at the first step
SEED = 1


def main(arguments):
    if arguments.embedding == "sok":
        import sok_keras as sok

        sok.init()
    path = arguments.data or made_file(arguments.rows)
    dense, ids, label = criteo.read(path)
    if arguments.embedding == "keras":
        ids, vocabulary_sizes = count_ids(ids)
        embed, wrap = keras_embeddings(vocabulary_sizes), lambda optimizer: optimizer
    else:
        embed, wrap = sok_embeddings, sok_wrap

    num_steps = arguments.epochs * math.ceil(criteo.num_train_rows(len(label)) / arguments.batch_size)
    model = build_model(embed, arguments.tower, wrap(adam(num_steps)))
    train(model, dense, ids, label, arguments.batch_size, arguments.epochs)
    held_out = held_out_rows(dense, ids)
    predictions = predict(model, held_out)
    report(path, label[-len(predictions) :], predictions)
    if arguments.embedding == "sok":
        fresh_model = build_model(embed, arguments.tower, wrap(adam(num_steps)))
        dump_and_load(arguments.dump, model, fresh_model, held_out, predictions)


def made_file(num_rows):
    """Returns the path of a made file of `num_rows`, which is made unless it is there."""
    path = Path("data") / f"criteo_{num_rows}.tsv"
    if not path.exists() and rank() == 0:
        print(f"making {path}")
        criteo.make(path, num_rows)
    wait_for_ranks()
    return path


def build_model(embed, tower, optimizer):
    """Returns a compiled DeepFM: dense float32 `(batch, 13)` and ids int64 `(batch, 26)` to clicks `(batch, 1)`.

    Args:
        embed: a function from ids to rows, `(batch, 26)` to `(batch, 26, ROW_DIM)`.
        tower: units of each hidden layer.
    """
    # The same initial weights whatever `embed` draws, so that two embeddings can be compared.
    keras.utils.set_random_seed(SEED)
    dense = keras.Input((criteo.NUM_DENSE,), dtype="float32", name="integers")
    ids = keras.Input((criteo.NUM_CATEGORICAL,), dtype="int64", name="ids")
    # A dense feature has a row too, which its value multiplies.
    scale = keras.layers.EinsumDense(
        "bf,fd->bfd",
        (criteo.NUM_DENSE, ROW_DIM),
        kernel_initializer=initializer(criteo.NUM_CATEGORICAL),
        name="dense_rows",
    )
    layers = [keras.layers.Dense(units, activation="relu") for units in tower] + [keras.layers.Dense(1)]

    rows = keras.ops.concatenate([scale(dense), embed(ids)], axis=1)  # (batch, 39, ROW_DIM)
    embeddings, weights = rows[:, :, :EMBEDDING_DIM], rows[:, :, EMBEDDING_DIM]
    deep = keras.layers.Flatten()(embeddings)
    for layer in layers:
        deep = layer(deep)
    first_order = keras.ops.sum(weights, axis=1, keepdims=True)
    click = keras.ops.sigmoid(first_order + second_order(embeddings) + deep)

    model = keras.Model([dense, ids], click)
    model.compile(optimizer, loss="binary_crossentropy")
    return model


def adam(num_steps):
    # Down to 0, so that the noise of the last batches does not stay in the weights: 0.002 of AUC, measured.
    return keras.optimizers.Adam(keras.optimizers.schedules.PolynomialDecay(LEARNING_RATE, num_steps, 0.0))


def second_order(embeddings):
    """Returns `(batch, 1)`: the sum of the dot products of all pairs, in time linear in the number of features."""
    square_of_sum = keras.ops.square(keras.ops.sum(embeddings, axis=1))
    sum_of_squares = keras.ops.sum(keras.ops.square(embeddings), axis=1)
    return 0.5 * keras.ops.sum(square_of_sum - sum_of_squares, axis=1, keepdims=True)


def initializer(column):
    # Small, for ids and integers alike: each pair adds to the logit, and a sum of 741 large products that training
    # must first unlearn costs more AUC than all ids of a rare column bring (0.73 instead of 0.79, measured).
    return keras.initializers.RandomUniform(-0.01, 0.01, seed=SEED + column)


def feature_name(column):
    return f"categorical_{column + 1}"


def sok_embeddings(ids):
    """Returns the rows of `ids`, one dynamic table a column, all looked up in one call."""
    import sok_keras as sok

    names = [feature_name(column) for column in range(criteo.NUM_CATEGORICAL)]
    tables = [
        sok.TableConfig(name, None, ROW_DIM, initializer=initializer(column), combiner="sum", seed=SEED + column)
        for column, name in enumerate(names)
    ]
    features = {table.name: sok.FeatureConfig(table.name, table) for table in tables}
    columns = {name: ids[:, column : column + 1] for column, name in enumerate(names)}
    rows = sok.DistributedEmbedding(features, name="embeddings")(columns)
    return keras.ops.stack([rows[name] for name in names], axis=1)


def sok_wrap(optimizer):
    import sok_keras as sok

    return sok.OptimizerWrapper(optimizer)


def keras_embeddings(vocabulary_sizes):
    """Returns the same with `keras.layers.Embedding`, for counted ids."""

    def embed(ids):
        rows = []
        for column, size in enumerate(vocabulary_sizes):
            table = keras.layers.Embedding(size, ROW_DIM, initializer(column), name=feature_name(column))
            rows.append(table(ids[:, column]))
        return keras.ops.stack(rows, axis=1)

    return embed


def count_ids(ids):
    """Returns ids as places in the sorted training ids of their column, and the table sizes that this needs.

    Ids that training does not have share the last place, which nothing trains.
    """
    places, sizes = np.empty_like(ids), []
    for column, values in enumerate(ids.T):
        known = np.unique(values[: criteo.num_train_rows(len(ids))])
        place = np.minimum(np.searchsorted(known, values), len(known) - 1)
        places[:, column] = np.where(known[place] == values, place, len(known))
        sizes.append(len(known) + 1)
    return places, sizes


def rank():
    """Returns the number of this process among those that train together, 0 if it is alone."""
    sok = sys.modules.get("sok_keras")
    return sok.rank() if sok else 0


def wait_for_ranks():
    if "sok_keras" in sys.modules:
        sys.modules["sok_keras"].barrier()


def train(model, dense, ids, label, batch_size, epochs):
    num_rows = criteo.num_train_rows(len(label))
    # In the order of the file, as clicks come in.
    arrays = [dense[:num_rows], ids[:num_rows], label[:num_rows]]
    callbacks = []
    if "sok_keras" in sys.modules and sys.modules["sok_keras"].world_size() > 1:
        import sok_keras as sok

        arrays = [share(array, batch_size, sok.rank(), sok.world_size()) for array in arrays]
        batch_size //= sok.world_size()
        callbacks = [sok.callbacks.Distributed()]
    start = time.perf_counter()
    model.fit(arrays[:2], arrays[2], batch_size, epochs, PROGRESS, callbacks, shuffle=False)
    if rank() == 0:
        print(f"trained on {num_rows} rows in {time.perf_counter() - start:.1f} s")


def share(array, batch_size, rank, num_ranks):
    """Returns a rank's part of each batch. What does not fill the last batch is left out."""
    batches = array[: len(array) // batch_size * batch_size].reshape(
        -1, num_ranks, batch_size // num_ranks, *array.shape[1:]
    )
    return batches[:, rank].reshape(-1, *array.shape[1:])


def held_out_rows(dense, ids):
    num_rows = criteo.num_train_rows(len(ids))
    return [dense[num_rows:], ids[num_rows:]]


def predict(model, inputs):
    """Returns float32 `(num_rows,)`. Nothing is inserted: an id without a row gets the row that it would start with."""
    return model.predict(inputs, batch_size=4096, verbose=0)[:, 0]


def report(path, label, predictions):
    if rank() > 0:
        return
    best_auc = criteo.facts_of(path).get("best_auc")
    print(
        f"held-out AUC: {criteo.auc(label, predictions):.4f}" + (f", best possible: {best_auc:.4f}" if best_auc else "")
    )


def dump_and_load(path, model, fresh_model, held_out, predictions):
    """Shows that a dump is the whole model: tables, dense weights and optimizer."""
    import sok_keras as sok

    sok.dump(path, model)
    sok.load(path, fresh_model)
    np.testing.assert_array_equal(predict(fresh_model, held_out), predictions)
    num_rows = sum(len(table) for table in model.get_layer("embeddings").get_tables().values())
    if rank() > 0:
        return
    print(f"dumped {num_rows} rows to {path}; a fresh model loaded from there predicts the same")


if __name__ == "__main__":
    main(arguments)
