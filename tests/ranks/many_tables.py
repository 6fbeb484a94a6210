"""A rank that trains 26 mixed tables for 100 steps with batches of other sizes than the other ranks', some of them empty."""

import os
import sys

import keras
import numpy as np
from seeds import draw_seeds_from

import sok_keras as sok

STEPS, BATCH, NUM_TABLES = 100, 12, 26
# Tables with an optimizer of their own, one of which every rank has.
OWN_OPTIMIZERS = (3, 6, 10)
PLACEMENTS = ["distributed", "localized:0", "localized:1", "auto"]


def config(number):
    """Static and dynamic tables, with ids that all are met or few; of some of them every rank has all rows."""
    size = None if number % 2 else 5 + 3 * number
    own = keras.optimizers.Adam(0.01) if number in OWN_OPTIMIZERS else None
    placement = "replicated" if number % 8 == 6 else PLACEMENTS[number // 2 % len(PLACEMENTS)]
    return sok.TableConfig(
        f"table{number}",
        size,
        1 + number % 5,
        initializer=keras.initializers.RandomUniform(seed=number),
        combiner=("sum", "mean", "sqrtn")[number % 3],
        placement=placement,
        optimizer=own,
    )


def make_model(optimizer):
    draw_seeds_from(0)
    configs = [config(number) for number in range(NUM_TABLES)]
    layer = sok.DistributedEmbedding(
        {
            each.name: sok.FeatureConfig(each.name, each, (None, 1 + number % 4), (None, each.embedding_dim))
            for number, each in enumerate(configs)
        }
    )
    inputs = {
        each.name: keras.Input((1 + number % 4,), dtype="int64", name=each.name) for number, each in enumerate(configs)
    }
    rows = layer(inputs)
    hidden = keras.layers.Dense(6, "tanh")(keras.layers.Concatenate()([rows[each.name] for each in configs]))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile(sok.OptimizerWrapper(optimizer, gradient_reduction="sum"), sum_of_squares)
    return model, layer.get_tables()


def sum_of_squares(targets, outputs):
    """A sum over the samples of all ranks, whatever part of them each has. Keras' own losses are no number for an empty batch."""
    return keras.ops.sum(keras.ops.square(targets - outputs))


def batches():
    draw = np.random.default_rng(1)
    for _ in range(STEPS):
        ids = {}
        for number in range(NUM_TABLES):
            each = config(number)
            largest = each.vocabulary_size or int(draw.choice([20, 2**40]))
            ids[each.name] = draw.integers(0, largest, (BATCH, 1 + number % 4))
        yield ids, draw.normal(size=(BATCH, 1)).astype("float32")


def share(array, step):
    """The samples of this rank: two thirds for rank 0 and one third for rank 1, in turns with all for one of them."""
    if sok.world_size() == 1:
        return array
    first = {0: 8, 1: 12, 2: 8, 3: 0}[step % 4]
    return array[:first] if sok.rank() == 0 else array[first:]


def main(folder):
    sok.init(timeout=60)
    model, tables = make_model(keras.optimizers.Adagrad(0.05))
    for step, (ids, targets) in enumerate(batches()):
        model.train_on_batch({name: share(of, step) for name, of in ids.items()}, share(targets, step))
    arrays = {}
    for number, variable in enumerate(v for v in model.trainable_variables if "trigger" not in v.path):
        arrays[f"dense{number}"] = keras.ops.convert_to_numpy(variable)
    for name, table in tables.items():
        contents = table.export(states=True)
        arrays |= {f"{name} keys": contents.keys, f"{name} rows": contents.rows}
        arrays |= {f"{name} {state}": values for state, values in contents.states.items()}
    np.savez(os.path.join(folder, f"rank{sok.rank()}of{sok.world_size()}.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
