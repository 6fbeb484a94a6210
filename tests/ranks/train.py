"""A rank that trains a model on its share of each batch, and writes what it has in the end."""

import os
import sys

import keras
import numpy as np
from seeds import draw_seeds_from

import sok_keras as sok

STEPS, BATCH = 8, 24


def make_model(policy, optimizer, of_users=None):
    users, shops, words = (
        sok.TableConfig("users", None, 8, initializer="uniform", seed=1, combiner="sum", optimizer=of_users),
        sok.TableConfig("shops", 50, 4, initializer="uniform", seed=2, combiner="mean"),
        sok.TableConfig("words", None, 3, initializer="uniform", seed=3, combiner="sqrtn", placement="localized:0"),
    )
    layer = sok.DistributedEmbedding(
        {
            "user": sok.FeatureConfig("user", users, (None, 2), (None, 8)),
            "shop": sok.FeatureConfig("shop", shops, (None, 1), (None, 4)),
            "word": sok.FeatureConfig("word", words, (None, 3), (None, 3)),
        },
        dtype=policy,
    )
    other = sok.DynamicEmbedding(5, combiner="sum", seed=4, dtype=policy)
    inputs = {
        name: keras.Input((width,), dtype="int64", name=name)
        for name, width in {"user": 2, "shop": 1, "word": 3}.items()
    }
    rows = layer(inputs)
    parts = [rows["user"], rows["shop"], rows["word"], other(inputs["user"])]
    hidden = keras.layers.Dense(6, "relu", dtype=policy)(keras.layers.Concatenate(dtype=policy)(parts))
    output = keras.layers.Dense(1, dtype="float32")(hidden)
    model = keras.Model(inputs, output)
    model.compile(optimizer, "mse")
    return model, [*layer.get_tables().values(), other.get_table()]


def batches(seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(STEPS):
        inputs = {
            "user": draw.integers(0, 2**40, (BATCH, 2)) // draw.choice([1, 2**36], (BATCH, 2)),
            "shop": draw.integers(0, 50, (BATCH, 1)),
            "word": draw.integers(0, 9, (BATCH, 3)),
        }
        yield inputs, draw.normal(size=(BATCH, 1)).astype("float32")


def share(array):
    size = len(array) // sok.world_size()
    return array[sok.rank() * size : (sok.rank() + 1) * size]


class Momentum(keras.optimizers.SGD):
    """An optimizer that the core has no formula for, because it is a subclass. Its own `update_step` updates the rows."""


OPTIMIZERS = {
    "adam": lambda: sok.OptimizerWrapper(keras.optimizers.Adam(0.01)),
    "clipped": lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)),
    "accumulated": lambda: sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2)),
    "general": lambda: sok.OptimizerWrapper(Momentum(0.05, global_clipnorm=0.5)),
    "table's own": lambda: sok.OptimizerWrapper(keras.optimizers.SGD(0.1)),
}
# The optimizer of the table `users` alone. Its norm is that of all ranks, which nobody else asks for.
OF_USERS = {"table's own": lambda: keras.optimizers.SGD(0.5, clipnorm=0.01)}


def train(folder, case):
    draw_seeds_from(sok.rank())  # first values come from rank 0 all the same
    model, tables = make_model("float32", OPTIMIZERS[case](), OF_USERS.get(case, lambda: None)())
    layers = {type(layer): layer for layer in model.layers}
    parts = [({name: share(ids) for name, ids in inputs.items()}, share(targets)) for inputs, targets in batches()]
    losses = []
    for number, (inputs, targets) in enumerate(parts):
        # Of the last batch other ids are told than those that come.
        told, _ = parts[min(number + 1, len(parts) - 2)]
        sok.prefetch(layers[sok.DistributedEmbedding], told)
        sok.prefetch(layers[sok.DynamicEmbedding], told["user"])
        losses.append(float(model.train_on_batch(inputs, targets)))
    dense = {
        f"dense{number}": keras.ops.convert_to_numpy(variable)
        for number, variable in enumerate(model.trainable_variables)
        if "trigger" not in variable.path
    }
    rows = {}
    for number, table in enumerate(tables):
        contents = table.export(states=True)
        rows[f"keys{number}"], rows[f"rows{number}"] = contents.keys, contents.rows
    np.savez(os.path.join(folder, f"{case}{sok.rank()}.npz"), losses=np.array(losses), **dense, **rows)


if __name__ == "__main__":
    sok.init(timeout=30)
    for each in sys.argv[2:] or OPTIMIZERS:
        train(sys.argv[1], each)
