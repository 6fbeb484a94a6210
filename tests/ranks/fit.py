"""A rank that fits and evaluates a model on its share of the samples, and writes the metrics that it is told."""

import json
import os
import sys

import keras
import numpy as np
from train import share

import sok_keras as sok


def main(folder):
    sok.init(timeout=30)
    keras.utils.set_random_seed(0)
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 40, (96, 2))
    x, y = ids, (ids.sum(axis=1) % 3 == 0).astype("float32")[:, None]
    inputs = keras.Input((2,), dtype="int64")
    rows = sok.DynamicEmbedding(4, combiner="sum", seed=1)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(rows))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="accuracy")]
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.02)), "binary_crossentropy", metrics=metrics)
    # Batches of all ranks together are the same, whatever their number.
    batches = np.arange(96).reshape(4, 24)
    own = np.concatenate([share(batch) for batch in batches])
    stop = keras.callbacks.EarlyStopping("val_auc", patience=1, mode="max")
    told = model.fit(
        x[own],
        y[own],
        batch_size=24 // sok.world_size(),
        epochs=3,
        shuffle=False,
        validation_data=(share(x), share(y)),
        callbacks=[sok.callbacks.Distributed(), stop],
        verbose=2,
    ).history
    told["evaluated"] = model.evaluate(share(x), share(y), verbose=0, return_dict=True)
    with open(os.path.join(folder, f"told{sok.rank()}.json"), "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
