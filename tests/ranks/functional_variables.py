"""A rank that trains variables in a loop of JAX or PyTorch by its share of each batch."""

import os
import sys

import keras
import numpy as np

import sok_keras as sok

STEPS, BATCH = 12, 8


def gradients(triggers, loss):
    values = [trigger.value for trigger in triggers]
    if keras.backend.backend() == "jax":
        import jax

        return jax.grad(loss)(values)
    import torch

    return list(torch.autograd.grad(loss(None), values))


def main(folder):
    sok.init(timeout=60)
    rank, world_size = sok.rank(), sok.world_size()
    variables = [
        sok.DynamicVariable(3, initializer="1", name="spread"),
        sok.DynamicVariable(2, initializer="2", name="whole", mode="localized:0"),
        sok.Variable(np.ones((40, 2)), name="fixed"),
    ]
    triggers = sok.triggers(variables)
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adagrad(0.1), gradient_reduction="sum")
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = draw.integers(0, 40, (BATCH, 3)).astype("int32")
        ids[draw.integers(0, BATCH), 1:] = -1
        own = keras.ops.convert_to_tensor(ids[rank * BATCH // world_size : (rank + 1) * BATCH // world_size])

        def loss(values, own=own):
            rows = sok.lookup_sparse(variables, [own] * 3, combiners=["sum", "mean", "sqrtn"], triggers=values)
            return sum(keras.ops.sum(keras.ops.square(row)) for row in rows)

        optimizer.apply(gradients(triggers, loss), triggers)
    arrays = {}
    for variable in variables:
        contents = variable.table.export(states=True)
        arrays |= {f"{variable.name} keys": contents.keys, f"{variable.name} rows": contents.rows}
    arrays["all rows"] = variables[2].numpy()
    np.savez(os.path.join(folder, f"rank{rank}of{world_size}.npz"), **arrays)


main(sys.argv[1])
