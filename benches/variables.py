"""Training steps with `DynamicVariable`s, over those with a `DistributedEmbedding` of the same tables, in turns in one process.

    KERAS_BACKEND=tensorflow python benches/variables.py [--tables 200] [--samples 256] [--eager]

Ids come in bags of 0 to 4. The gradients of the combined rows are given. Prints the medians and their ratio.
"""

import argparse
import statistics
import time

import keras
import numpy as np

import sok_keras as sok

DIM, ROUNDS = 16, 40
BACKEND = keras.backend.backend()


def batches(num_tables, samples, draw):
    """Ids by table: values and row splits."""
    lengths = draw.integers(0, 5, (num_tables, samples))
    splits = [np.concatenate([[0], np.cumsum(of_table)]) for of_table in lengths]
    return [(draw.zipf(1.2, of_table[-1]) % 100_000, of_table) for of_table in splits]


def optimizer():
    return sok.OptimizerWrapper(keras.optimizers.Adam(1e-3))


def layer_of(num_tables):
    tables = [
        sok.TableConfig(f"t{number}", None, DIM, keras.initializers.Constant(1.0), combiner="sum")
        for number in range(num_tables)
    ]
    layer = sok.DistributedEmbedding([sok.FeatureConfig(table.name, table) for table in tables])
    layer.build()
    return layer


def tensorflow_steps(num_tables, is_eager):
    import tensorflow as tf

    layer, of_layer = layer_of(num_tables), optimizer()
    variables = [sok.DynamicVariable(DIM, initializer="1") for _ in range(num_tables)]
    of_variables = optimizer()
    of_layer.build(layer.trainable_variables)
    of_variables.build(variables)

    def ragged(batch):
        return [tf.RaggedTensor.from_row_splits(tf.constant(ids), tf.constant(splits)) for ids, splits in batch]

    def with_layer(ids, gradients):
        with tf.GradientTape() as tape:
            rows = layer(ids, training=True)
        trained = layer.trainable_variables
        of_layer.apply(tape.gradient(rows, [v.value for v in trained], output_gradients=gradients), trained)

    def with_variables(ids, gradients):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(variables, ids, combiners="sum")
        of_variables.apply_gradients(
            zip(tape.gradient(rows, variables, output_gradients=gradients), variables, strict=True)
        )

    steps = [with_layer, with_variables]
    if not is_eager:
        ids = [tf.RaggedTensorSpec([None, None], tf.int64)] * num_tables
        signature = [ids, [tf.TensorSpec([None, DIM])] * num_tables]
        steps = [tf.function(step, input_signature=signature) for step in steps]
    return ragged, steps


def other_steps(num_tables, is_eager):
    del is_eager
    layer, of_layer = layer_of(num_tables), optimizer()
    variables = [sok.DynamicVariable(DIM, initializer="1") for _ in range(num_tables)]
    triggers, of_variables = sok.triggers(variables), optimizer()
    of_layer.build(layer.trainable_variables)
    of_variables.build(variables)

    def pairs(batch):
        return [tuple(keras.ops.convert_to_tensor(part.astype("int32")) for part in pair) for pair in batch]

    def of_layer_rows(values, ids):
        given = [{"values": one, "row_splits": splits} for one, splits in ids]
        return (
            layer.stateless_call(values, [], given, training=True)[0]
            if BACKEND == "jax"
            else layer(given, training=True)
        )

    def of_variables_rows(values, ids):
        return sok.lookup_sparse(variables, ids, combiners="sum", triggers=values)

    if BACKEND == "jax":
        import jax

        def step(rows_of, trained, its_optimizer):
            def train(values, state, ids, gradients):
                (found,) = jax.vjp(lambda values: rows_of(values, ids), values)[1](gradients)
                return its_optimizer.stateless_apply(state, found, values)

            compiled = jax.jit(train)
            state = [[v.value for v in some] for some in (trained, its_optimizer.variables)]

            def run(ids, gradients):
                state[:] = jax.block_until_ready(compiled(*state, ids, gradients))

            return run
    else:
        import torch

        def step(rows_of, trained, its_optimizer):
            values = [v.value for v in trained]

            def run(ids, gradients):
                found = torch.autograd.grad(rows_of(None, ids), values, gradients)
                its_optimizer.apply(list(found), trained)

            return run

    return pairs, [
        step(of_layer_rows, layer.trainable_variables, of_layer),
        step(of_variables_rows, triggers, of_variables),
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    draw = np.random.default_rng(0)
    make = tensorflow_steps if BACKEND == "tensorflow" else other_steps
    convert, steps = make(arguments.tables, arguments.eager)
    given = [convert(batches(arguments.tables, arguments.samples, draw)) for _ in range(4)]
    gradients = [
        keras.ops.convert_to_tensor(draw.normal(size=(arguments.samples, DIM)).astype("float32"))
        for _ in range(arguments.tables)
    ]
    times = [[], []]
    for number in range(ROUNDS + 4):
        for step, of_step in zip(steps, times, strict=True):
            start = time.perf_counter()
            step(given[number % 4], gradients)
            of_step.append(time.perf_counter() - start)
    layer, variables = (1e3 * statistics.median(of_step[4:]) for of_step in times)
    how = "eager" if arguments.eager or BACKEND == "torch" else "compiled"
    print(
        f"| {BACKEND}, {how} | {arguments.tables} | {arguments.samples} | {layer:.2f} | {variables:.2f} | {variables / layer:.2f} |"
    )


main()
