"""What ranks gain in `model.fit`: the example's DeepFM with a tower of 10 x 1024, batches of 16,384 a rank, on each number of GPUs.

    KERAS_BACKEND=jax JAX_ENABLE_X64=1 python benches/gpu_ranks.py FOLDER_OF_EXAMPLES [--ranks 1 2]

Prints a row of a table for each number of ranks: ms a step, and samples a second beside those of one rank.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

BATCH, BATCHES, EPOCHS, TOWER, ROWS = 16_384, 24, 6, [1024] * 10, 1_000_000


def train(examples):
    import keras
    import numpy as np

    import sok_keras as sok

    sok.init(timeout=120)
    sys.path.insert(0, examples)
    import criteo_deepfm as example

    if keras.backend.backend() == "torch":
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            times.append(1e3 * (time.perf_counter() - self.start) / BATCHES)

    times = []
    random = np.random.default_rng(sok.rank())
    num, num_ids = BATCH * BATCHES, example.criteo.NUM_CATEGORICAL
    dense = random.normal(size=(num, example.criteo.NUM_DENSE)).astype("float32")
    ids = (((ROWS**-0.05 - 1) * random.random((num, num_ids)) + 1) ** (1 / -0.05)).astype("int64")
    labels = random.integers(0, 2, (num, 1)).astype("float32")
    model = example.build_model(example.sok_embeddings, TOWER, example.sok_wrap(keras.optimizers.Adam(1e-3)))
    model.fit([dense, ids], labels, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Clock()])
    if sok.rank() == 0:
        on_gpu = any(layer._core.group.is_on_gpu for layer in model._flatten_layers() if hasattr(layer, "_core"))
        print(f"milliseconds {statistics.median(times[2:])} {on_gpu}", flush=True)


def measure(ranks, examples):
    command = [
        sys.executable,
        "-m",
        "sok_keras.launch",
        "-n",
        str(ranks),
        os.path.abspath(__file__),
        examples,
        "--rank",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    _, milliseconds, on_gpu = next(line for line in done.stdout.splitlines() if line.startswith("milliseconds")).split()
    return float(milliseconds), on_gpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("examples")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", action="store_true", help="to be one of the ranks")
    arguments = parser.parse_args()
    if arguments.rank:
        return train(arguments.examples)
    first = None
    for ranks in arguments.ranks:
        milliseconds, on_gpu = measure(ranks, arguments.examples)
        first = first or ranks / milliseconds
        gain = ranks / milliseconds / first
        print(f"| {os.environ['KERAS_BACKEND']} | {ranks} | {milliseconds:.2f} | {gain:.2f} | {on_gpu} |", flush=True)


main()
