"""A rank that looks up its share of a batch, beside `tf.nn.embedding_lookup_sparse` of dense copies of the tables."""

import itertools
import sys

import keras
import numpy as np
import tensorflow as tf

import sok_keras as sok
from sok_keras import distributed

ROWS, BATCH = 23, 16
DIMS = (3, 5, 4, 6)
# One variable comes twice.
CHOSEN = (0, 1, 2, 3, 0)


def batch_of(rank, world_size, draw):
    """Ids and weights of all samples of a feature, and this rank's."""
    lengths = draw.integers(0, 5, BATCH)
    lengths[3] = 0
    ids, weights = draw.integers(0, ROWS, lengths.sum()), draw.uniform(0.5, 2, lengths.sum()).astype("float32")
    both = [tf.RaggedTensor.from_row_lengths(values, lengths) for values in (ids, weights)]
    # The first rank has fewer samples than the others.
    bounds = [0, *(BATCH // 8 + (BATCH - BATCH // 8) * (r + 1) // world_size for r in range(world_size - 1)), BATCH]
    return both, [one[bounds[rank] : bounds[rank + 1]] for one in both], slice(bounds[rank], bounds[rank + 1])


def dense_gradients(dense, features, combiner, weighted, upstream, rows):
    """Rows of samples, and the gradients of the tables."""
    with tf.GradientTape() as tape:
        found = []
        for number, (ids, weights) in zip(CHOSEN, features, strict=True):
            # Samples without ids at the end would be left out.
            ids, weights = (tensor.to_sparse() for tensor in (ids, weights))
            found.append(
                tf.nn.safe_embedding_lookup_sparse(dense[number], ids, weights if weighted else None, combiner=combiner)
            )
    gradients = tape.gradient(found, dense, output_gradients=[one[rows] for one in upstream])
    return found, [summed(one, rows.shape) for one, rows in zip(gradients, dense, strict=True)]


def summed(slices, shape):
    total = np.zeros(shape, "float64")
    np.add.at(total, slices.indices.numpy(), slices.values.numpy())
    return total


def whole(variable):
    """Keys and rows that all ranks have."""
    return [np.concatenate(distributed.gather_arrays(array.numpy())) for array in sok.export(variable)]


def main():
    sok.init(timeout=60)
    rank, size = sok.rank(), sok.size()
    draw = np.random.default_rng(0)
    tables = [draw.normal(size=(ROWS, dim)).astype("float32") for dim in DIMS]
    variables = [
        sok.DynamicVariable(DIMS[0], name="spread"),
        sok.DynamicVariable(DIMS[1], name="whole", mode=f"localized:{size - 1}"),
        sok.Variable(tables[2], name="fixed"),
        sok.Variable(tables[3], name="fixed_whole", mode="localized:0"),
    ]
    for variable, rows in zip(variables[:2], tables[:2], strict=True):
        sok.assign(variable, np.arange(ROWS)[rank::size], rows[rank::size])
    for variable, rows in zip(variables, tables, strict=True):
        keys, exported = whole(variable)
        np.testing.assert_array_equal(np.sort(keys), np.arange(ROWS))
        np.testing.assert_array_equal(exported, rows[keys])
    assert sok.export(variables[1])[0].shape[0] == (ROWS if rank == size - 1 else 0)
    optimizer = sok.OptimizerWrapper(keras.optimizers.SGD(0.1), gradient_reduction="sum")
    for combiner, weighted, form in itertools.product(("sum", "mean", "sqrtn"), (False, True), ("ragged", "sparse")):
        dense = [tf.Variable(rows) for rows in tables]
        batches = [batch_of(rank, size, draw) for _ in CHOSEN]
        rows = batches[0][2]
        upstream = [tf.constant(draw.normal(size=(BATCH, DIMS[number])).astype("float32")) for number in CHOSEN]
        _, of_all = dense_gradients(
            dense, [of_all for of_all, _, _ in batches], combiner, weighted, upstream, slice(None)
        )
        features = [own for _, own, _ in batches]
        expected, of_own = dense_gradients(dense, features, combiner, weighted, upstream, rows)
        given = [[t.to_sparse() for t in pair] for pair in features] if form == "sparse" else features
        with tf.GradientTape() as tape:
            found = sok.lookup_sparse(
                [variables[number] for number in CHOSEN],
                [ids for ids, _ in given],
                [weights for _, weights in given] if weighted else None,
                combiners=[combiner] * len(CHOSEN),
            )
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
        gradients = tape.gradient(found, variables, output_gradients=[one[rows] for one in upstream])
        for one, own in zip(gradients[:2], of_own, strict=False):
            np.testing.assert_allclose(summed(one, own.shape), own, rtol=1e-6, atol=1e-6)
        for variable, one, total in zip(variables[2:], gradients[2:], of_all[2:], strict=True):
            own = total[variable.own_ids()]
            np.testing.assert_allclose(summed(one, own.shape), own, rtol=1e-6, atol=1e-6)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        tables = [(table - 0.1 * total).astype("float32") for table, total in zip(tables, of_all, strict=True)]
        for variable, table in zip(variables, tables, strict=True):
            keys, now = whole(variable)
            np.testing.assert_array_equal(np.sort(keys), np.arange(ROWS))
            np.testing.assert_allclose(now, table[keys], rtol=1e-6, atol=2e-6)
            table[keys] = now
    path = sys.argv[1]
    sok.dump(path, variables, optimizer)
    before = [tuple(array.numpy() for array in sok.export(variable)) for variable in variables]
    for variable in variables:
        sok.assign(variable, np.arange(ROWS), np.zeros((ROWS, variable.shape[1])))
    sok.load(path, variables, optimizer)
    for variable, (keys, rows) in zip(variables, before, strict=True):
        for one, other in zip(sok.export(variable), (keys, rows), strict=True):
            np.testing.assert_array_equal(one, other)


main()
