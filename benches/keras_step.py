"""A training step through Keras without a model around it: embeddings and their optimizer, on the backend of this process.

The gradients of the rows are given, so nothing is computed but what embeddings cost.
"""

import keras
import numpy as np

import sok_keras as sok
import work


def step_of(layer, optimizer, batches, dim):
    """`step(number)`: a step with the batch of that number in turn, as the backend's trainer would run it; it waits for the end.

    Args:
        layer: From ids, a list with an array for each feature, to a list of their rows `(BATCH, dim)`.
        batches: Such lists.
    """
    given = [[keras.ops.convert_to_tensor(ids) for ids in batch] for batch in batches]
    layer(given[0], training=False)  # builds it
    optimizer.build(layer.trainable_variables)
    random = np.random.default_rng(0)
    gradients = [random.normal(size=(work.BATCH, dim)).astype("float32") * 1e-3 for _ in given[0]]
    gradients = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
    make = {"tensorflow": _tensorflow_step, "jax": _jax_step, "torch": _torch_step}[keras.backend.backend()]
    train = make(layer, optimizer)
    return lambda number: train(given[number % len(given)], gradients)


def _tensorflow_step(layer, optimizer):
    import tensorflow as tf

    @tf.function
    def train(ids, gradients):
        with tf.GradientTape() as tape:
            rows = layer(ids, training=True)
        variables = layer.trainable_variables
        found = tape.gradient(rows, [v.value for v in variables], output_gradients=gradients)
        optimizer.apply(found, variables)

    return train


def _jax_step(layer, optimizer):
    import jax

    def train(trainable, state, ids, gradients):
        def rows(trainable):
            return layer.stateless_call(trainable, [], ids, training=True)[0]

        (found,) = jax.vjp(rows, trainable)[1](gradients)
        return optimizer.stateless_apply(state, found, trainable)

    compiled = jax.jit(train, donate_argnums=(0, 1))
    # Copies: the variables' own arrays would be donated too.
    state = [[v.value.copy() for v in variables] for variables in (layer.trainable_variables, optimizer.variables)]

    def step(ids, gradients):
        state[:] = jax.block_until_ready(compiled(*state, ids, gradients))

    return step


def _torch_step(layer, optimizer):
    import torch

    variables = layer.trainable_variables

    def train(ids, gradients):
        for variable in variables:
            variable.value.grad = None
        torch.autograd.backward(layer(ids, training=True), gradients)
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)

    return train


def our_step(case, dim, optimizer=None):
    """The same step as `native_step.criteo_step`, by layer and wrapper. `optimizer`: Adam, if none is given."""
    initializer = keras.initializers.RandomUniform(seed=1)
    tables = [sok.TableConfig(f"t{t}", None, dim, initializer, combiner="sum") for t in range(len(work.sizes()))]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])
    optimizer = sok.OptimizerWrapper(optimizer or keras.optimizers.Adam(1e-3))
    batches = [[work.raw(ids) for ids in work.features_of(batch)] for batch in work.batches(case)]
    step = step_of(layer, optimizer, batches, dim)
    for table, start, count in zip(layer.get_tables().values(), work.offsets(), work.sizes(), strict=True):
        table.find_or_insert(work.scattered(start, count))

    def waited(number):
        step(number)
        table.synchronize()  # for the GPU, if the tables are there

    return waited
