"""A rank that trains tables with policies. The ranks check what they see against all batches."""

import collections

import keras
import numpy as np

import sok_keras as sok

DIM, STEPS = 4, 12

sok.init(timeout=60)
rank, world_size = sok.rank(), sok.world_size()


def train(layer, batches):
    inputs = keras.Input((5,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    for batch in batches:
        share = batch[rank * len(batch) // world_size : (rank + 1) * len(batch) // world_size]
        model.train_on_batch(share, np.ones((len(share), 1)))


random = np.random.default_rng(1)  # the same on all ranks
batches = (random.zipf(1.5, (STEPS, 4 * world_size, 5)) % 200).astype("int32")

# With room for all ids, scores count those of all ranks.
roomy = sok.DynamicEmbedding(DIM, max_capacity=10_000, eviction="lfu")
train(roomy, batches)
contents = roomy.get_table().export(scores=True)
counts = collections.Counter(batches.ravel().tolist())
assert dict(zip(contents.keys.tolist(), contents.scores.tolist(), strict=True)) == counts
assert roomy.get_table().step == STEPS + 1

# `max_capacity` is that of all ranks.
capacity = 60
small = sok.DynamicEmbedding(
    DIM, max_capacity=capacity, eviction=sok.policies.LRU(keep_evicted=True), check_mode="count"
)
train(small, batches)
table = small.get_table()
stats, keys = table.stats(), table.keys()
assert len(table) <= capacity and stats.evicted > 0
assert stats.inserted - stats.evicted == stats.size == len(keys)
evicted = table.take_evicted()
assert len(evicted.keys) == stats.evicted and evicted.rows.shape == (stats.evicted, DIM)
assert len(table.take_evicted(local=True).keys) == 0
gone = sorted(set(evicted.keys.tolist()) - set(keys.tolist()))
# Each rank asks for a key of its own.
explained = table.explain(gone[rank])
assert explained.state == "evicted" and 1 <= explained.step <= STEPS, explained
present = table.explain(int(keys[-1 - rank]))
assert present.state == "present" and 1 <= present.score <= STEPS, present
assert table.explain(-5).state == "absent"

# The ids of all ranks count for admission.
filtering = sok.DynamicEmbedding(DIM, admission=sok.policies.Frequency(5))
train(filtering, batches)
assert filtering.get_table().keys().tolist() == sorted(key for key, count in counts.items() if count >= 5)
rare = sorted(key for key, count in counts.items() if count < 5)
assert filtering.get_table().explain(rare[rank]).sights == counts[rare[rank]]

# A row stays while any rank trains it.
expiring = sok.DynamicEmbedding(DIM, time_to_live=3)
train(expiring, batches)
recent = sorted(set(np.concatenate(batches[-3:]).ravel().tolist()))
assert expiring.get_table().keys().tolist() == recent
assert expiring.get_table().stats().expired > 0

# The same rows go in each run: all ranks agree on what is left.
digest = int(np.bitwise_xor.reduce(keys)) + int(table.export(scores=True).scores.sum())
assert sok.all_reduce(digest) == world_size * digest

# A score is the highest that came with an id in the last step that has met it, on any rank.
layer = sok.DynamicEmbedding(DIM, max_capacity=10_000, eviction=sok.policies.Custom())
ids, given = (keras.Input((5,), dtype="int32") for _ in range(2))
rows = keras.layers.Flatten()(layer(ids, scores=given))
model = keras.Model([ids, given], keras.layers.Dense(1)(rows))
model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
expected = {}
for batch in batches:
    scores = random.integers(0, 1000, batch.shape).astype("int32")
    part = slice(rank * len(batch) // world_size, (rank + 1) * len(batch) // world_size)
    model.train_on_batch([batch[part], scores[part]], np.ones((len(batch[part]), 1)))
    highest = {}
    for key, score in zip(batch.ravel().tolist(), scores.ravel().tolist(), strict=True):
        highest[key] = max(highest.get(key, 0), score)
    expected |= highest
contents = layer.get_table().export(scores=True)
assert dict(zip(contents.keys.tolist(), contents.scores.tolist(), strict=True)) == expected
