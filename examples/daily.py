"""Trains DeepFM day by day, as a service does: each day in a process of its own, which goes on from yesterday's dump.

Each day brings other clicks, and new ids that no table has. The process of a day loads the dump of the day before,
predicts the day's clicks before it trains on them, trains, and dumps. Beside it, the model of day 0 predicts too: what
a model loses that nobody trains any further.

    python examples/daily.py --backend jax --days 5 --drift 0.1
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--folder", type=Path, default=Path("data/daily"), help="where clicks are made, and dumps kept")
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000, help="clicks a day")
    parser.add_argument("--drift", type=float, default=0.1, help="share of the ids that are new each day")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--day", type=int, help="train on this day alone; day 0 starts anew")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    # Keras reads this when it is first imported, so it must be known before.
    if arguments.backend:
        os.environ["KERAS_BACKEND"] = arguments.backend

# Without it JAX turns int64 ids into int32 ones.
os.environ.setdefault("JAX_ENABLE_X64", "1")

import criteo

TOWER = [128, 128]


def main(arguments):
    if arguments.day is not None:
        train_day(arguments, arguments.day)
        return
    for day in range(arguments.days):
        subprocess.run([sys.executable, *sys.argv, "--day", str(day)], check=True)


def train_day(arguments, day):
    """Goes on from the dump of the day before: predicts, trains, dumps."""
    import keras

    import sok_keras as sok
    from criteo_deepfm import LEARNING_RATE, build_model, predict, sok_embeddings

    def model_of_day(number):
        model = build_model(sok_embeddings, TOWER, sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE)))
        if number is not None:
            sok.load(dump_of(arguments.folder, number), model)
        return model

    path = clicks_of(arguments, day)
    dense, ids, label = criteo.read(path)
    model = model_of_day(day - 1 if day > 0 else None)
    tables = model.get_layer("embeddings").get_tables().values()
    if day > 0:
        before = criteo.auc(label, predict(model, [dense, ids]))
        unknown = sum(table.stats().unknown_ids for table in tables) / ids.size
        of_first = criteo.auc(label, predict(model_of_day(0), [dense, ids]))
        best = criteo.facts_of(path)["best_auc_of_all"]
        print(
            f"day {day}: AUC {before:.4f} before training; {of_first:.4f} of the model of day 0; best possible {best:.4f}; "
            f"{unknown:.1%} of the ids unknown"
        )
    start = time.perf_counter()
    model.fit([dense, ids], label, arguments.batch_size, verbose=0, shuffle=False)
    seconds = time.perf_counter() - start
    sok.dump(dump_of(arguments.folder, day), model)
    print(
        f"day {day}: trained on {len(label)} clicks in {seconds:.1f} s, dumped {sum(map(len, tables))} rows", flush=True
    )


def clicks_of(arguments, day):
    """Returns the path of the day's clicks, which are made unless they are there."""
    path = arguments.folder / f"clicks_{arguments.rows}_{arguments.drift}_day_{day}.tsv"
    if not path.exists():
        criteo.make(path, arguments.rows, day=day, drift=arguments.drift)
    return path


def dump_of(folder, day):
    return folder / f"day_{day}.dump"


if __name__ == "__main__":
    main(arguments)
