"""Trains a two-tower retrieval model on Gowalla's check-ins: a vector a user, a vector an item, keyed by their ids.

Neither tower has a vocabulary: a row comes into being when its user or item is first trained on. The other items of a
batch serve as negatives. Then all items are ranked for each user, and recall@20 is compared with ranking by
popularity. Last, a user nobody has heard of is scored, and no row comes of it.

    git clone https://github.com/geon0325/LightGCNpp
    python examples/two_tower.py --backend torch --data LightGCNpp/data/gowalla
    python examples/two_tower.py --data LightGCNpp/data/gowalla --embedding keras    # keras.layers.Embedding, for comparison

Published on this split, recall@20: matrix factorisation with BPR loss 0.129, LightGCN 0.183.

References: Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", RecSys 2019.
"""

import argparse
import os
import sys
import time
from pathlib import Path

# Keras' progress bar in a terminal, one line for each epoch in a log.
PROGRESS = 1 if sys.stdout.isatty() else 2

SOURCE = (
    "train.txt, test.txt and, if there is one, valid.txt, with lines `user item item ...`, with or without gowalla_ before their "
    "names. They are in data/gowalla of "
    "https://github.com/geon0325/LightGCNpp; NGCF's and LightGCN's own repositories have the same pairs, validation part and "
    "training part in one train.txt"
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/gowalla"), help=f"folder of {SOURCE}")
    parser.add_argument("--backend", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--embedding", choices=("sok", "keras"), default="sok")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    for name in ("train.txt", "test.txt"):
        if not part_of(arguments.data, name).exists():
            parser.error(f"{name} is not in {arguments.data}. --data must name the folder of {SOURCE}")
    return arguments


def part_of(folder, name):
    plain = folder / name
    return plain if plain.exists() else folder / f"gowalla_{name}"


if __name__ == "__main__":
    arguments = parse_arguments()
    # Keras reads this when it is first imported, so it must be known before.
    if arguments.backend:
        os.environ["KERAS_BACKEND"] = arguments.backend

# Without it JAX turns int64 ids into int32 ones. Keras' own numbers stay float32.
os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np

DIM = 64
LEARNING_RATE = 3e-3
NUM_RECOMMENDED = 20
UNKNOWN_USER = 10**12
SEED = 1


def main(arguments):
    users, items = training_pairs(arguments.data)
    test_users, test_items = read_pairs(part_of(arguments.data, "test.txt"))
    num_items = 1 + int(max(items.max(), test_items.max()))
    popularity = np.bincount(items, minlength=num_items).astype(np.float32)

    keras.utils.set_random_seed(SEED)
    if arguments.embedding == "keras":
        embeddings = keras_embeddings(1 + int(users.max()), num_items)
    else:
        embeddings = sok_embeddings()
    user_tower, item_tower, model = build_model(*embeddings)
    train(model, users, items, popularity, arguments.batch_size, arguments.epochs)

    # Only users that the test asks about; each once.
    asked = np.unique(test_users)
    user_vectors = predict(user_tower, asked)
    item_vectors = predict(item_tower, np.arange(num_items))
    trained, wanted = pairs_by_user(asked, users, items), pairs_by_user(asked, test_users, test_items)
    everyone = np.ones((len(asked), 1), np.float32)
    print(f"recall@20 of popularity: {recall(everyone, popularity[:, None], trained, wanted):.4f}")
    print(f"recall@20 of two towers: {recall(user_vectors, item_vectors, trained, wanted):.4f}")
    if arguments.embedding == "sok":
        score_unknown_user(user_tower, item_vectors)


def training_pairs(folder):
    """Returns users and items, int64 `(num_pairs,)`. As in the papers, the validation part is trained on too."""
    files = (part_of(folder, name) for name in ("train.txt", "valid.txt"))
    parts = [read_pairs(file) for file in files if file.exists()]
    users, items = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return users, items


def read_pairs(path):
    """Returns users and items, int64 `(num_pairs,)`, of a file of lines `user item item ...`."""
    lines = [np.array(line.split(), np.int64) for line in path.read_text().splitlines() if line.strip()]
    users = np.concatenate([np.full(len(line) - 1, line[0]) for line in lines])
    return users, np.concatenate([line[1:] for line in lines])


def build_model(user_embedding, item_embedding):
    """Returns the two towers, ids int64 `(batch,)` to vectors `(batch, DIM)`, and the model that trains them.

    That model's output is its loss: `(batch, 1)`, how surprising each user's item is among the items of the batch.
    """
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")
    log_frequency = keras.Input((), dtype="float32", name="log_frequency")
    user_vector, item_vector = user_embedding(user), item_embedding(item)

    surprise = in_batch_surprise(user_vector, item_vector, item, log_frequency)
    model = keras.Model([user, item, log_frequency], surprise)
    model.compile(optimizer_for(user_embedding), loss=lambda _, surprise: surprise)
    return keras.Model(user, user_vector), keras.Model(item, item_vector), model


def in_batch_surprise(user_vector, item_vector, item, log_frequency):
    """Returns `(batch, 1)`: -log of the softmax of each user's own item, among it and the other items of the batch."""
    ops = keras.ops
    # An item is in the batch about as often as it is popular; subtracting that makes up for it (logQ correction).
    own = ops.sum(user_vector * item_vector, axis=1, keepdims=True) - log_frequency[:, None]
    others = ops.matmul(user_vector, ops.transpose(item_vector)) - log_frequency[None, :]
    # The own item, wherever in the batch it stands, is no negative.
    others = ops.where(ops.equal(item[:, None], item[None, :]), -1e9, others)
    return ops.logsumexp(ops.concatenate([own, others], axis=1), axis=1, keepdims=True) - own


def sok_embeddings():
    """Returns the layers of users and items. Nobody counted either."""
    import sok_keras as sok

    return sok.DynamicEmbedding(DIM, seed=SEED, name="users"), sok.DynamicEmbedding(DIM, seed=SEED + 1, name="items")


def keras_embeddings(num_users, num_items):
    return keras.layers.Embedding(num_users, DIM, name="users"), keras.layers.Embedding(num_items, DIM, name="items")


def optimizer_for(embedding):
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    if isinstance(embedding, keras.layers.Embedding):
        return optimizer
    import sok_keras as sok

    return sok.OptimizerWrapper(optimizer)


def train(model, users, items, popularity, batch_size, epochs):
    log_frequency = np.log(popularity[items] / len(items))
    no_target = np.zeros((len(users), 1), np.float32)  # the batch itself is the target
    start = time.perf_counter()
    model.fit([users, items, log_frequency], no_target, batch_size, epochs, verbose=PROGRESS)
    print(f"trained on {len(users)} pairs in {time.perf_counter() - start:.1f} s")


def predict(tower, ids):
    """Returns float32 `(num_ids, DIM)`. Nothing is inserted: an id without a row gets the one that it would start with."""
    return tower.predict(ids, batch_size=4096, verbose=0)


def pairs_by_user(asked, users, items):
    """Returns a list of `len(asked)` arrays: the items of each user of `asked` (ascending)."""
    order = np.argsort(users, kind="stable")
    bounds = np.searchsorted(users[order], [asked, asked + 1])
    return [items[order[start:end]] for start, end in bounds.T]


def recall(user_vectors, item_vectors, trained, wanted, block_users=500):
    """Returns the mean share of a user's wanted items that are among the 20 that score best of those not trained on.

    Args:
        user_vectors, item_vectors: `(num_users, dim)` and `(num_items, dim)`; a score is their dot product.
        trained, wanted: a list of item arrays each, by user.
        block_users: users scored at once; 500 take 80 MB.
    """
    shares = []
    for start in range(0, len(user_vectors), block_users):
        scores = user_vectors[start : start + block_users] @ item_vectors.T
        for user, user_scores in enumerate(scores, start):
            user_scores[trained[user]] = -np.inf
            best = np.argpartition(user_scores, -NUM_RECOMMENDED)[-NUM_RECOMMENDED:]
            shares.append(np.isin(wanted[user], best).mean())
    return float(np.mean(shares))


def score_unknown_user(user_tower, item_vectors):
    """Shows that a user without a row is answered, near zero for each item, and gets none by being asked about."""
    table = user_tower.get_layer("users").get_table()
    num_users = len(table)
    scores = predict(user_tower, np.array([UNKNOWN_USER])) @ item_vectors.T
    assert np.isfinite(scores).all() and len(table) == num_users
    print(
        f"unknown user {UNKNOWN_USER}: scores within +-{np.abs(scores).max():.2f}, the table still has {num_users} rows"
    )


if __name__ == "__main__":
    main(arguments)
