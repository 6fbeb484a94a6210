"""A rank that trains with sums of dense gradients that start during the backward pass, and without. PyTorch's alone."""

import sys

import keras
import numpy as np
import torch
from seeds import draw_seeds_from
from train import OPTIMIZERS, batches, make_model, share

import sok_keras as sok
from sok_keras.backend import torch_sums

LARGEST = 20  # bytes of a bucket


def train(case, *, in_buckets, train_step=None):
    """Returns what was trained, and how many buckets had started when each step asked for them."""
    draw_seeds_from(0)
    model, tables = make_model("float32", OPTIMIZERS[case]())
    if train_step is not None:
        model.train_step = lambda data: train_step(model, data)
    model.optimizer.build(model.trainable_variables)
    sums, num_started = model.optimizer._tables.sums, []
    if in_buckets:
        take = sums.take

        def counted(gradients):
            num_started.append((len(sums._sums), len(sums._buckets)))
            return take(gradients)

        sums.take = counted
    else:
        model.optimizer._tables.sums = None
    for inputs, targets in batches():
        model.train_on_batch({name: share(ids) for name, ids in inputs.items()}, share(targets))
    dense = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables if "trigger" not in v.path]
    return [*dense, *(array for table in tables for array in (table.export().keys, table.export().rows))], num_started


def same(case, train_step=None):
    """Checks that the bits are those of one sum after the backward pass. Returns how many buckets had started."""
    (given, num_started), (expected, _) = (
        train(case, in_buckets=in_buckets, train_step=train_step) for in_buckets in (True, False)
    )
    for mine, other in zip(given, expected, strict=True):
        np.testing.assert_array_equal(mine, other)
    return num_started


def step_of(change):
    """A training step that changes something between the backward pass and the optimizer."""

    def train_step(model, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        model.zero_grad()

        def backward():
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
            model.optimizer.scale_loss(loss).backward() if not again else loss.backward()

        again = False
        backward()
        if change == "adds":
            again = True
            backward()
        dense = [v for v in model.trainable_variables if "trigger" not in v.path]
        if change == "scales" and sok.rank() == 1:
            dense[0].value.grad.mul_(0.5)
        variables = model.trainable_variables
        gradients = [v.value.grad for v in variables]
        if change == "replaces" and sok.rank() == 0:
            gradients = [g if v is not dense[-1] else g + 1 for g, v in zip(gradients, variables, strict=True)]
        if change == "forgets" and sok.rank() == 1:
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if v is not dense[0]]
            gradients, variables = map(list, zip(*pairs, strict=True))
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
        return {}

    return train_step


def main():
    sok.init(timeout=30)
    torch_sums._BUCKET_BYTES = LARGEST
    for case in OPTIMIZERS:
        num_started = same(case)
        assert all(started == of for started, of in num_started), num_started
        assert num_started[0][1] > 2, "there are many buckets"
    for change in ("scales", "replaces", "adds"):
        same("adam", step_of(change))
    try:
        train("adam", in_buckets=True, train_step=step_of("forgets"))
    except sok.RankError as error:
        assert f"rank {1 - sok.rank()} has gradients of other variables" in str(error), error
        sys.exit(7)


if __name__ == "__main__":
    main()
