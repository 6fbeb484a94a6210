"""The whole Keras step of examples/criteo_deepfm.py's model: `fit` with our tables, and with its dense parts alone.

    python benches/model.py [--backends jax torch] [--batch-sizes 512 4096]

The example's DeepFM (26 tables, rows of 11, three layers of 400, Adam) on 65,536 samples with the one-hot ids of step.py, which
the first epoch inserts. "Dense alone" is the same model on rows that are made of the ids by a multiplication and not trained. A
run is an epoch; a cell is milliseconds a step.
"""

import numpy as np

import work


def main():
    parser = work.parser(__doc__, runs=1)
    parser.add_argument("--backends", nargs="+", default=work.BACKENDS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[512, 4096])
    arguments = parser.parse_args()
    rows = []
    for name in arguments.backends:
        rows += work.in_own_process(measure, name, arguments, backend=name)
    columns = ["backend", "batch", "ours ms", "dense alone ms", "ours / dense alone", "range"]
    work.report("A step of the example's DeepFM", arguments, work.table(columns, rows))


def measure(name, arguments):
    from sok_keras.backend import native

    native.set_num_threads(arguments.threads)
    inputs, label = samples()
    rows = []
    for batch_size in arguments.batch_sizes:
        num_steps = len(label) / batch_size
        models = {"ours": our_model(), "dense alone": dense_model()}
        epochs = {name: epoch_of(model, inputs, label, batch_size) for name, model in models.items()}
        times = work.in_turns(epochs, arguments.rounds, arguments.runs, warm_up=1)
        a_step = [[time / num_steps for time in of_model] for of_model in times.values()]
        rows.append([name, batch_size, *map(work.ms, a_step), *work.ratio(*a_step)])
    return rows


def samples():
    ids = np.concatenate([work.raw(batch[:, :, 0]) for batch in work.batches("onehot")])
    random = np.random.default_rng(0)
    dense = random.random((len(ids), 13), "float32")
    label = random.integers(0, 2, len(ids)).astype("float32")
    return [dense, ids], label


def our_model():
    import keras

    import criteo_deepfm as example

    return example.build_model(example.sok_embeddings, [400] * 3, example.sok_wrap(keras.optimizers.Adam()))


def dense_model():
    import keras
    from keras import ops

    import criteo_deepfm as example

    def rows_of(ids):
        return ops.cast(ids, "float32")[:, :, None] * (ops.ones((1, 1, example.ROW_DIM)) * 1e-20)

    return example.build_model(rows_of, [400] * 3, keras.optimizers.Adam())


def epoch_of(model, inputs, label, batch_size):
    return lambda number: model.fit(inputs, label, batch_size, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
