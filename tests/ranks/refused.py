"""Ranks whose table removes rows when it is full, and whose commit is refused: the rows of that step may go."""

import keras
import numpy as np
from seeds import draw_seeds_from

import sok_keras as sok
from reference import apply_gradients, model_gradients

CAPACITY = 24


def main():
    sok.init(timeout=60)
    draw_seeds_from(0)
    layer = sok.DynamicEmbedding(4, max_capacity=CAPACITY, eviction="lru", seed=1)
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(layer(ids))))
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.1)), "mse")
    table, variables = layer.get_table(), model.trainable_variables

    def backward_pass(first):
        batch = np.arange(first, first + 18, dtype="int32")[None]
        return model_gradients(model, batch, np.ones((1, 1), "float32"))

    def error_of(call):
        try:
            call()
            table.synchronize()
        except Exception as error:
            return type(error).__name__
        return None

    applied = backward_pass(0)
    apply_gradients(model.optimizer, applied, variables)
    backward_pass(0)
    # The rows of the lookup before are in use. This call ends that step, too.
    assert error_of(lambda: backward_pass(100)) == "TableFullError"
    backward_pass(0)
    assert error_of(lambda: apply_gradients(model.optimizer, applied, variables)) == "TicketError"
    apply_gradients(model.optimizer, backward_pass(100), variables)
    assert set(range(100, 118)) <= set(table.keys().tolist())


if __name__ == "__main__":
    main()
