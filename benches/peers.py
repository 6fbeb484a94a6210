"""The same embedding work on what the frameworks themselves have: a step of each peer over ours, in one run.

    PEERS=1 make bench                      # or: python benches/peers.py [--backends torch] [--dims 16]

A step, with given gradients of the rows, of 26 tables with Adam, one-hot and bags of 8 summed, the batches of step.py. Ours is the
layer and `OptimizerWrapper` on the same backend, its ids raw. Peers need tables of a known size, and ids that are row numbers:

- `keras.layers.Embedding` and a sum over the bag; Keras' Adam moves the whole table.
- TensorFlow: `tf.nn.embedding_lookup_sparse`, whose gradients are `tf.IndexedSlices`, and Keras' Adam.
- PyTorch: `torch.nn.EmbeddingBag(sparse=True)` and `SparseAdam`, which moves the rows of the batch alone, as ours does.
"""

import time

import numpy as np

import work


def main():
    parser = work.parser(__doc__, rounds=2, runs=2)
    parser.add_argument("--backends", nargs="+", default=work.BACKENDS)
    parser.add_argument("--cases", nargs="+", default=list(work.BAGS))
    parser.add_argument("--dims", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--longest", type=float, default=8, help="seconds; a peer's step that takes longer is run once")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.backends:
        for case in arguments.cases:
            for dim in arguments.dims:
                rows += work.in_own_process(measure, name, case, dim, arguments, backend=name)
    columns = ["backend", "case", "dim", "peer", "peer ms", "ours ms", "peer / ours", "range"]
    work.report("Steps of the frameworks' own embeddings over ours", arguments, work.table(columns, rows))


def measure(name, case, dim, arguments):
    from keras_step import our_step
    from sok_keras.backend import native

    native.set_num_threads(arguments.threads)
    # Row numbers counted in each table.
    batches = [work.features_of(batch - work.offsets()[:, None]) for batch in work.batches(case)]
    ours = our_step(case, dim)
    rows = []
    for peer, make in peers_of(name).items():
        step = make(batches, dim)
        step(0)
        start = time.perf_counter()
        step(1)
        seconds = time.perf_counter() - start
        if seconds > arguments.longest:
            once = work.in_turns({"ours": ours}, 1, arguments.runs)["ours"]
            rows.append(
                [name, case, dim, peer, work.ms([seconds * 1e3]), work.ms(once), f"{seconds * 1e3 / once[0]:.1f}", "-"]
            )
            continue
        times = work.in_turns({"peer": step, "ours": ours}, arguments.rounds, arguments.runs, warm_up=1)
        rows.append([name, case, dim, peer, *map(work.ms, times.values()), *work.ratio(*times.values())])
        del step
    return rows


def peers_of(name):
    """Makers of steps, `make(batches, dim)`."""
    peers = {"keras Embedding": keras_embedding}
    if name == "tensorflow":
        peers["embedding_lookup_sparse"] = embedding_lookup_sparse
    if name == "torch":
        peers["EmbeddingBag, SparseAdam"] = embedding_bag
    return peers


def keras_embedding(batches, dim):
    import keras

    from keras_step import step_of

    class Embeddings(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.tables = [keras.layers.Embedding(rows, dim) for rows in work.sizes()]

        def build(self, shapes):
            for table in self.tables:
                table.build()

        def call(self, ids, training=None):
            return [keras.ops.sum(table(i), axis=1) for table, i in zip(self.tables, ids, strict=True)]

    return step_of(Embeddings(), keras.optimizers.Adam(1e-3), batches, dim)


def embedding_lookup_sparse(batches, dim):
    import keras
    import tensorflow as tf

    from keras_step import step_of

    class Embeddings(keras.layers.Layer):
        def build(self, shapes):
            self.tables = [self.add_weight((rows, dim), "uniform") for rows in work.sizes()]

        def call(self, ids, training=None):
            pairs = zip(self.tables, ids, strict=True)
            return [tf.nn.embedding_lookup_sparse(table.value, i, None, combiner="sum") for table, i in pairs]

    def sparse(ids):
        return tf.SparseTensor(np.argwhere(ids >= 0), np.ravel(ids), ids.shape)

    given = [[sparse(ids) for ids in batch] for batch in batches]
    return step_of(Embeddings(), keras.optimizers.Adam(1e-3), given, dim)


def embedding_bag(batches, dim):
    import torch

    tables = [torch.nn.EmbeddingBag(int(rows), dim, mode="sum", sparse=True) for rows in work.sizes()]
    optimizer = torch.optim.SparseAdam([table.weight for table in tables], lr=1e-3)
    given = [[torch.from_numpy(ids) for ids in batch] for batch in batches]
    random = np.random.default_rng(0)
    gradients = [torch.from_numpy(random.normal(size=(work.BATCH, dim)).astype("float32") * 1e-3) for _ in tables]

    def step(number):
        optimizer.zero_grad()
        rows = [table(ids) for table, ids in zip(tables, given[number % len(given)], strict=True)]
        torch.autograd.backward(rows, gradients)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
