"""A rank that fits and evaluates a model on its share of the samples, and writes the metrics that it is told."""

import json
import os
import sys

import keras
import numpy as np
from seeds import draw_seeds_from

import sok_keras as sok

EPOCHS = 20


def main(folder):
    sok.init(timeout=30)
    draw_seeds_from(0)
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 40, (91, 2))
    x, y = ids, (ids.sum(axis=1) % 3 == 0).astype("float32")[:, None]
    inputs = keras.Input((2,), dtype="int64")
    rows = sok.DynamicEmbedding(4, combiner="sum", seed=1)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(rows))
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="accuracy")]
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.3)), "binary_crossentropy", weighted_metrics=metrics)
    # The last batch has 90 - 72 samples, the same for each rank. Of 91 samples one cannot be divided.
    train, test = (
        sok.shard((x[:end], y[:end]), batch_size=24 // sok.world_size(), shuffle=end == 90) for end in (90, 91)
    )
    stop = sok.callbacks.EarlyStopping("val_auc", patience=1, mode="max", restore_best_weights=True)
    callbacks = [sok.callbacks.Distributed(), stop]
    told = model.fit(train, epochs=EPOCHS, shuffle=False, validation_data=test, callbacks=callbacks, verbose=2).history
    told["evaluated"] = model.evaluate(test, verbose=0, return_dict=True)
    assert 2 < len(told["loss"]) < EPOCHS, "all ranks have stopped early"
    np.testing.assert_allclose(
        told["evaluated"]["auc"], max(told["val_auc"]), rtol=1e-6
    )  # of the epoch that was restored
    with open(os.path.join(folder, f"told{sok.rank()}.json"), "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
