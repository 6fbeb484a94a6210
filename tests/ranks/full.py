"""Ranks that dump a full table, or load what others have dumped: `full.py FOLDER save|load EVICTION`."""

import sys

import keras
import numpy as np

import sok_keras as sok

CAPACITY = 101

sok.init(timeout=60)
folder, what, eviction = sys.argv[1], sys.argv[2], sys.argv[3] if sys.argv[3] != "none" else None
rank, world_size = sok.rank(), sok.world_size()


def make():
    layer = sok.DynamicEmbedding(4, max_capacity=CAPACITY, eviction=eviction, check_mode="count", seed=1, name="e")
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    return model, layer.get_table()


def train(model, steps, first=0):
    random = np.random.default_rng(first)
    for _ in range(steps):
        ids = first + random.integers(0, 1000, 60).astype("int32")
        model.train_on_batch(ids[rank::world_size], np.ones((len(ids[rank::world_size]), 1)))


model, table = make()
path, weights = f"{folder}/dump", f"{folder}/w.weights.h5"
if what == "save":
    train(model, 20)
    sok.dump(path, model)
    train(model, 1)
    sok.dump_increment(path, model)
    model.save_weights(weights)
    assert CAPACITY <= len(table) < CAPACITY + world_size
    sys.exit()

expected = sok.read_manifest(path)
sok.load(path, model)
contents = table.export(states=True, scores=eviction is not None)
other, of_other = make()
other.load_weights(weights)
for one, two in zip(contents[:2], of_other.export()[:2], strict=True):
    np.testing.assert_array_equal(one, two)
before, num_rows = set(contents.keys.tolist()), len(contents.keys)
assert num_rows >= CAPACITY, num_rows
# New ids make the table remove what is too much, or are refused.
train(model, 3, first=10_000)
evicted = table.stats().evicted
if eviction is None:
    assert before <= set(table.keys().tolist())
else:
    assert len(table) < CAPACITY + world_size and evicted > 0
    assert table.stats().inserted > 0
