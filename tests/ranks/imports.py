"""A rank that imports what SparseOperationKit has dumped, and writes it back."""

import sys
from pathlib import Path

import keras
import numpy as np

import sok_keras as sok


def main(folder):
    sok.init(timeout=30)
    layer = sok.DynamicEmbedding(3, name="items")
    ids = keras.Input((), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile(sok.OptimizerWrapper("adam"), "mse")
    model.optimizer.build(model.trainable_variables)
    table = layer.get_table()
    outcomes = sok.importers.sok(folder / "from", table, states=True, progress=False)["items"]
    assert outcomes.inserted == len(table), outcomes
    own = len(table.keys(local=True))
    assert 0 < own < len(table) or sok.world_size() == 1
    sok.exporters.sok(folder / f"to{sok.world_size()}", table, states=True)
    contents = table.export(states=True)
    if sok.rank() == 0:
        arrays = {"keys": contents.keys, "rows": contents.rows, **contents.states}
        np.savez(folder / f"world{sok.world_size()}.npz", **arrays)


main(Path(sys.argv[1]))
