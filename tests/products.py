"""A model whose loss has the gradients that it is given."""

import keras
from keras import ops

import sok_keras as sok


class Product(keras.layers.Layer):
    """Sum of products with coefficients, which are the gradients of the rows, in the order of the samples of an epoch."""

    def call(self, rows, coefficients):
        return ops.sum(ops.cast(rows, "float32") * coefficients, axis=(1, 2), keepdims=True)[:, 0]


def product_model(layer, optimizer, hotness, coefficients_shape, **compile_arguments):
    """Takes ids `(batch, hotness)` and the gradients of the layer's rows, `(batch, *coefficients_shape)`."""
    ids, coefficients = keras.Input((hotness,), dtype="int32"), keras.Input(coefficients_shape)
    rows = keras.layers.Reshape(coefficients_shape)(layer(ids))
    model = keras.Model([ids, coefficients], Product(dtype="float32")(rows, coefficients))
    loss = lambda _, products: ops.sum(products)
    model.compile(sok.OptimizerWrapper(optimizer), loss=loss, **compile_arguments)
    return model
