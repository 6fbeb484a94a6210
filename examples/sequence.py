"""Trains a model that predicts a user's next item from the items before it, in their order.

The last items go through a GRU; padding has a mask. All items of the history, however many, make a mean: these are
ragged features, which nothing pads to the longest history. Users have no rows. So a cold user, who was not in the
training data, is served as the others are, and recall@20 is printed for both.

    git clone https://github.com/kang205/SASRec
    python examples/sequence.py --backend torch --data SASRec/data/Video.txt

References: Hidasi et al., "Session-based recommendations with recurrent neural networks", ICLR 2016. Data: McAuley et
al., "Image-based recommendations on styles and substitutes", SIGIR 2015.
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Keras' progress bar in a terminal, one line for each epoch in a log.
PROGRESS = 1 if sys.stdout.isatty() else 2

SOURCE = (
    "a file of lines `user item`, in each user's order of time, as data/Video.txt of https://github.com/kang205/SASRec"
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/Video.txt"), help=SOURCE)
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.data.exists():
        parser.error(f"{arguments.data} is not there. --data must name {SOURCE}")
    return arguments


if __name__ == "__main__":
    arguments = parse_arguments()
    # Keras reads this when it is first imported, so it must be known before.
    if arguments.backend:
        os.environ["KERAS_BACKEND"] = arguments.backend

import keras
import numpy as np

import sok_keras as sok
from two_tower import in_batch_surprise

DIM = 64
LEARNING_RATE = 3e-3
NUM_RECENT = 10  # items that the GRU sees
MAX_HISTORY = 200  # items of the mean
NO_ITEM = -1
COLD_SHARE = 10  # one user in ten is not trained on
NUM_RECOMMENDED = 20
SEED = 1


def main(arguments):
    items, starts = read_histories(arguments.data)
    is_cold = np.random.default_rng(SEED).random(len(starts) - 1) < 1 / COLD_SHARE
    keras.utils.set_random_seed(SEED)
    user_model, model, layers = build_model()
    train(model, layers, items, starts, is_cold, arguments.batch_size, arguments.epochs)

    candidates, vectors = item_vectors(layers["items"].get_table())
    popularity = popularity_of(candidates, training_items(items, starts, is_cold))
    for name, chosen in (("known", ~is_cold), ("cold", is_cold)):
        # The last item of each user is what the model should find. It was not trained on.
        positions = starts[1:][chosen] - 1
        histories = Histories(layers, items, starts[:-1][chosen], positions)
        wanted = np.searchsorted(candidates, items[positions])
        wanted[~np.isin(items[positions], candidates)] = -1  # never seen in training, so never found
        users = user_model.predict(histories, verbose=0)
        print(f"recall@20 for {len(users)} {name} users, of popularity: {recall_of_best(popularity, wanted):.4f}")
        print(f"recall@20 for {len(users)} {name} users, of the model: {recall(users, vectors, wanted):.4f}")


def read_histories(path):
    """Returns the items of all users, one user after the other in order of time, int32 `(num_items,)`; and where each user starts,
    int64 `(num_users + 1,)`. Users with fewer than three items are left out."""
    users, items = np.loadtxt(path, dtype="int64", ndmin=2).T
    order = np.argsort(users, kind="stable")
    _, of_user, counts = np.unique(users[order], return_inverse=True, return_counts=True)
    is_kept = counts[of_user] >= 3
    starts = np.concatenate([[0], np.cumsum(counts[counts >= 3])])
    return items[order][is_kept].astype("int32"), starts


def build_model():
    """Returns a model from histories to user vectors `(batch, DIM)`, the model that trains it, and the layers of items.

    The training model's output is its loss: `(batch, 1)`, how surprising each next item is among those of the batch.
    """
    items = sok.DynamicEmbedding(DIM, padding_key=NO_ITEM, seed=SEED, name="items")
    taste = sok.DynamicEmbedding(DIM, combiner="mean", padding_key=NO_ITEM, seed=SEED + 1, name="taste")
    recent = keras.Input((NUM_RECENT,), dtype="int32", name="recent")
    values = keras.Input((), dtype="int32", name="values")
    row_splits = keras.Input((), dtype="int32", name="row_splits")
    next_item = keras.Input((), dtype="int32", name="next_item")
    log_frequency = keras.Input((), dtype="float32", name="log_frequency")

    order = keras.layers.GRU(DIM)(items(recent))  # the layer's mask ends each sequence at its last item
    mean = taste({"values": values, "row_splits": row_splits})
    user = keras.layers.Dense(DIM)(keras.ops.concatenate([order, mean], axis=1))
    surprise = in_batch_surprise(user, items(next_item), next_item, log_frequency)

    history = {"recent": recent, "values": values, "row_splits": row_splits}
    model = keras.Model({**history, "next_item": next_item, "log_frequency": log_frequency}, surprise)
    model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(LEARNING_RATE)), loss=lambda _, surprise: surprise)
    return keras.Model(history, user), model, {"items": items, "taste": taste}


class Histories(keras.utils.PyDataset):
    """Batches of histories: of each position, the items of its user that come before it.

    Args:
        layers: the layer of ragged features is `layers["taste"]`.
        items: all items.
        starts, positions: `(num_examples,)`, where the example's user starts in `items`, and its position there.
        log_frequency: `(num_examples,)`, for training: batches then have the items at the positions, and are shuffled.
    """

    def __init__(self, layers, items, starts, positions, log_frequency=None, batch_size=1024):
        super().__init__()
        self.layers, self.items, self.starts, self.positions = layers, items, starts, positions
        self.log_frequency, self.batch_size = log_frequency, batch_size
        self.random = np.random.default_rng(SEED)
        self.order = np.arange(len(positions))
        self.on_epoch_end()

    def __len__(self):
        return -(-len(self.positions) // self.batch_size)

    def on_epoch_end(self):
        if self.log_frequency is not None:
            self.random.shuffle(self.order)

    def __getitem__(self, number):
        chosen = self.order[number * self.batch_size : (number + 1) * self.batch_size]
        starts, ends = self.starts[chosen], self.positions[chosen]
        histories = [
            self.items[start:end] for start, end in zip(np.maximum(starts, ends - MAX_HISTORY), ends, strict=True)
        ]
        batch = {
            "recent": recent_of(self.items, starts, ends),
            **self.layers["taste"].preprocess(histories, ragged=True),
        }
        if self.log_frequency is None:
            return (batch,)
        batch |= {"next_item": self.items[ends], "log_frequency": self.log_frequency[chosen]}
        return batch, np.zeros((len(chosen), 1), "float32")  # the batch itself is the target


def recent_of(items, starts, ends):
    """Returns the last `NUM_RECENT` items before each end, int32 `(num_ends, NUM_RECENT)`; padding comes last."""
    positions = np.maximum(starts, ends - NUM_RECENT)[:, None] + np.arange(NUM_RECENT)
    return np.where(positions < ends[:, None], items[np.minimum(positions, len(items) - 1)], NO_ITEM).astype("int32")


def train(model, layers, items, starts, is_cold, batch_size, epochs):
    """Trains on all items of users who are not cold, but for the first item of each and the last, which is for the test."""
    positions = np.arange(len(items))
    user_starts = np.repeat(starts[:-1], np.diff(starts))
    is_last = np.isin(positions, starts[1:] - 1)
    is_trained = (positions > user_starts) & ~is_last & ~np.repeat(is_cold, np.diff(starts))
    positions = positions[is_trained]
    popularity = np.bincount(items[positions], minlength=items.max() + 1)
    log_frequency = np.log(popularity[items[positions]] / len(positions)).astype("float32")
    histories = Histories(layers, items, user_starts[is_trained], positions, log_frequency, batch_size)
    start = time.perf_counter()
    model.fit(histories, epochs=epochs, verbose=PROGRESS)
    print(f"trained on {len(positions)} items in {time.perf_counter() - start:.1f} s")


def training_items(items, starts, is_cold):
    """Returns the items of the histories that were trained on."""
    is_known = ~np.repeat(is_cold, np.diff(starts))
    is_known[starts[1:] - 1] = False
    return items[is_known]


def item_vectors(table):
    """Returns the items that have a row, ascending, and their rows."""
    contents = table.export()
    return contents.keys, contents.rows


def popularity_of(candidates, items):
    """Returns how often each candidate comes in `items`."""
    known, counts = np.unique(items, return_counts=True)
    places = np.minimum(np.searchsorted(known, candidates), len(known) - 1)
    return np.where(known[places] == candidates, counts[places], 0)


def recall_of_best(scores, wanted):
    """Returns the share of wanted candidates that are among the 20 with the best scores."""
    return float(np.isin(wanted, np.argsort(-scores, kind="stable")[:NUM_RECOMMENDED]).mean())


def recall(users, vectors, wanted, block_users=500):
    """Returns the share of users whose wanted item is among the 20 that score best.

    Args:
        users, vectors: `(num_users, dim)` and `(num_candidates, dim)`; a score is their dot product.
        wanted: `(num_users,)`, a candidate's place in `vectors`, or -1 if it is not there.
        block_users: users scored at once.
    """
    hits = 0
    for start in range(0, len(users), block_users):
        scores = users[start : start + block_users] @ vectors.T
        best = np.argpartition(scores, -NUM_RECOMMENDED, axis=1)[:, -NUM_RECOMMENDED:]
        hits += (best == wanted[start : start + block_users, None]).sum()
    return hits / len(users)


if __name__ == "__main__":
    main(arguments)
