"""A rank that trains variables of TensorFlow with a fixed number of rows by its share of each batch."""

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_keras as sok
from sok_keras.backend.private_keras import row_states_of

ROWS, STEPS, BATCH = 41, 20, 12


def main(folder):
    sok.init(timeout=60)
    rank, world_size = sok.rank(), sok.world_size()
    first = np.random.default_rng(1).normal(size=(ROWS, 3)).astype("float32")
    initializer = keras.initializers.RandomUniform(seed=5)
    variables = [
        sok.Variable(first, dtype=tf.float32, name="spread"),
        sok.Variable(shape=[ROWS, 2], initializer=initializer, mode=f"localized:{world_size - 1}", name="whole"),
        sok.Variable(shape=[ROWS, 2], initializer=initializer, name="drawn"),
        sok.DynamicVariable(2, initializer="2", name="grows"),
    ]
    spread, whole, drawn, _ = variables
    own = len(range(rank, ROWS, world_size))
    assert [v.shape[0] for v in variables[:3]] == [own, ROWS if rank == world_size - 1 else 0, own]
    np.testing.assert_array_equal(spread, first[rank::world_size])
    layer = sok.DynamicEmbedding(3, initial_value=first)
    layer.build()
    contents = layer.get_table().export()
    np.testing.assert_array_equal(contents.keys, np.arange(ROWS))
    np.testing.assert_array_equal(contents.rows, first)
    assert len(layer.get_table().keys(local=True)) < ROWS or world_size == 1
    dense = keras.Variable(np.full(2, 1.0 + rank, "float32"))  # that of rank 0 goes to all
    inner = keras.optimizers.Adagrad(0.1)
    optimizer = sok.OptimizerWrapper(inner, gradient_reduction="sum")

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def step(ids):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(variables, [ids] * 4, combiners=["sum", "mean", "sqrtn", "sum"])
            rows.append(sok.all2all_dense_embedding(drawn, ids.values))
            losses = [tf.reduce_sum(tf.square(row)) for row in rows]
            loss = tf.add_n([*losses, tf.reduce_sum(rows[1] * dense.value)])
        trained = [*variables, dense]
        gradients = tape.gradient(loss, [*variables, dense.value])
        optimizer.apply_gradients(zip(gradients, trained, strict=True))

    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        lengths = draw.integers(0, 4, BATCH)
        batch = tf.RaggedTensor.from_row_lengths(draw.integers(0, ROWS, lengths.sum()), lengths)
        # The first rank has fewer rows than the others.
        bounds = [0, *(BATCH // 6 + (BATCH - BATCH // 6) * (r + 1) // world_size for r in range(world_size - 1)), BATCH]
        step(batch[bounds[rank] : bounds[rank + 1]])
    arrays = {v.name.removesuffix(":0"): v.numpy() for v in variables[:3]}
    arrays |= {"dense": dense.numpy(), "ids of whole": sok.export(whole)[0].numpy()}
    np.savez(os.path.join(folder, f"static{rank}of{world_size}.npz"), **arrays)
    path = os.path.join(folder, f"dump{world_size}")
    manifest = sok.dump(path, variables, optimizer)
    assert len(manifest.tables) == 4 + 3  # the states of three variables
    files = os.path.join(folder, f"files{world_size}")
    sok.exporters.sok(files, variables[:3], states=True, optimizer=optimizer, progress=False)
    if world_size > 1:
        # All ranks hear of an id that one of them gives.
        ids = tf.constant([0, ROWS if rank == 1 else 1], tf.int64)
        with pytest.raises(sok.SokError, match=f"Ids of spread:0 must be at least 0 and less than {ROWS}"):
            sok.all2all_dense_embedding(spread, ids)
        with pytest.raises((ValueError, sok.RankError), match="less than"):
            sok.assign(spread, [ROWS if rank == 1 else 1], np.zeros((1, 3)))
        with pytest.raises((TypeError, ValueError, sok.RankError), match="integer|int64|keys|Keys"):
            sok.assign(spread, [0.5 if rank == 1 else 1], np.zeros((1, 3)))
        for clipping in ("clipnorm", "global_clipnorm"):
            with pytest.raises(ValueError, match=f"{clipping}=1.0"):
                sok.OptimizerWrapper(keras.optimizers.SGD(**{clipping: 1.0})).build([spread])
        saved = [*variables[:3], *(row_states_of(optimizer, v)["accumulators"] for v in variables[:3])]
        before = [np.array(v) for v in saved]
        for read in (
            lambda: sok.load(path, variables, optimizer),
            lambda: sok.importers.sok(files, variables[:3], states=True, optimizer=optimizer, progress=False),
        ):
            for v in saved:
                v.assign(tf.zeros_like(v))
            read()
            for v, rows in zip(saved, before, strict=True):
                np.testing.assert_array_equal(v, rows)
        # The dump of one process, which has other ranks for the rows.
        sok.load(os.path.join(folder, "dump1"), variables, optimizer)
        of_one = [np.array(v) for v in saved]
        for v, rows in zip(of_one, before, strict=True):
            np.testing.assert_allclose(v, rows, rtol=1e-5, atol=1e-6)
        sok.importers.sok(
            os.path.join(folder, "files1"), variables[:3], states=True, optimizer=optimizer, progress=False
        )
        for v, rows in zip(saved, of_one, strict=True):
            np.testing.assert_array_equal(v, rows)
    sok.assign(spread, [ROWS - 1 - rank, 0], np.full((2, 3), [[rank], [7]]))
    for row, value in [(0, 7), *((ROWS - 1 - other, other) for other in range(world_size))]:
        if row % world_size == rank:
            assert (spread.numpy()[row // world_size] == value).all()


main(sys.argv[1])
