"""How fast ranks on GPUs load a dump, beside a plain read of its files by as many processes.

    KERAS_BACKEND=torch python benches/gpu_load.py FOLDER [--gib 20] [--dumped-by 3] [--loaded-by 2]

FOLDER says on which disk. Files are dropped from the cache before each cold read. Prints a row of a table for each.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

DIM = 64
BYTES_A_KEY = 8 + 3 * 4 * DIM
CHUNK = 500_000


def model():
    import keras

    import sok_keras as sok

    layers = [sok.DynamicEmbedding(DIM, combiner="sum", seed=number, name=f"table{number}") for number in range(4)]
    inputs = [keras.Input((1,), dtype="int32") for _ in layers]
    rows = keras.layers.Concatenate()([layer(ids) for layer, ids in zip(layers, inputs, strict=True)])
    made = keras.Model(inputs, keras.layers.Dense(1)(rows))
    made.compile(sok.OptimizerWrapper(keras.optimizers.Adam(1e-3)), "mse")
    made.optimizer.build(made.trainable_variables)
    return made, [layer.get_table() for layer in layers]


def make(folder, gib):
    import sok_keras as sok

    sok.init(timeout=300)
    made, tables = model()
    num_keys = int(gib * 2**30 / BYTES_A_KEY / len(tables))
    rows = np.random.default_rng(0).normal(size=(CHUNK, DIM)).astype("float32")
    for first in range(0, num_keys, sok.world_size() * CHUNK):
        start = first + sok.rank() * CHUNK
        keys = np.arange(start, max(start, min(start + CHUNK, num_keys)))
        for table in tables:
            table.assign(keys, rows[: len(keys)])
    start = time.perf_counter()
    sok.dump(folder, made)
    if sok.rank() == 0:
        print(f"seconds {time.perf_counter() - start}", flush=True)


def load(folder):
    import sok_keras as sok

    sok.init(timeout=300)
    made, _ = model()
    for is_cold in (True, False, True, False):
        if sok.rank() == 0:
            prepare(folder, is_cold)
        sok.barrier()
        start = time.perf_counter()
        sok.load(folder, made)
        sok.barrier()
        if sok.rank() == 0:
            where = (
                "GPUs"
                if made.layers and all(layer._core.gpu is not None for layer in made.layers if hasattr(layer, "_core"))
                else "host"
            )
            print(f"seconds {is_cold} {time.perf_counter() - start} {where}", flush=True)


def files(folder):
    return sorted(path for path in pathlib.Path(folder).iterdir() if path.is_file())


def prepare(folder, is_cold):
    """Drops the files from the cache, or reads them into it."""
    os.sync()
    for path in files(folder):
        with open(path, "rb") as file:
            if is_cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass


def plain(folder, processes, is_cold):
    prepare(folder, is_cold)
    shares = [[str(path) for path in files(folder)[number::processes]] for number in range(processes)]
    start = time.perf_counter()
    running = [
        subprocess.Popen(["sh", "-c", 'for f; do dd if="$f" of=/dev/null bs=16M status=none; done', "read", *share])
        for share in shares
    ]
    assert all(process.wait() == 0 for process in running)
    return time.perf_counter() - start


def ranks(count, *arguments):
    command = [
        sys.executable,
        "-m",
        "sok_keras.launch",
        "-n",
        str(count),
        os.path.abspath(__file__),
        *map(str, arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("seconds")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--dumped-by", type=int, default=3)
    parser.add_argument("--loaded-by", type=int, default=2)
    parser.add_argument("--part", choices=["make", "load"])
    arguments = parser.parse_args()
    folder = os.path.join(arguments.folder, "dump")
    if arguments.part:
        return make(folder, arguments.gib) if arguments.part == "make" else load(folder)
    options = [arguments.folder, "--gib", arguments.gib]
    ((dumped,),) = ranks(arguments.dumped_by, *options, "--part", "make")
    size = sum(path.stat().st_size for path in files(folder)) / 1e9
    print(f"| {size:.1f} GB, written by {arguments.dumped_by} ranks | {size / float(dumped):.2f} GB/s |\n|---|---|")
    of_plain = {
        is_cold: min(plain(folder, arguments.loaded_by, is_cold) for _ in range(2)) for is_cold in (True, False)
    }
    loads = ranks(arguments.loaded_by, *options, "--part", "load")
    for is_cold, name in ((True, "from the disk"), (False, "from the cache")):
        seconds = min(float(time) for cold, time, _ in loads if cold == str(is_cold))
        print(f"| plain read by {arguments.loaded_by} processes, {name} | {size / of_plain[is_cold]:.2f} GB/s |")
        print(f"| load by {arguments.loaded_by} ranks into {loads[0][2]}, {name} | {size / seconds:.2f} GB/s |")


if __name__ == "__main__":
    main()
