"""Bags of ids as tensors of TensorFlow."""

import numpy as np


def bags(form, num_keys, seed=0):
    """Ids of five rows, one of them empty, and weights of the same form."""
    import tensorflow as tf

    random = np.random.default_rng(seed)
    lengths = [3, 0, 1, 4, 2]
    ids, weights = random.integers(0, num_keys, sum(lengths)), random.uniform(0.5, 2, sum(lengths)).astype("float32")
    ragged = [tf.RaggedTensor.from_row_lengths(values, lengths) for values in (ids, weights)]
    return ragged if form == "ragged" else [tensor.to_sparse() for tensor in ragged]
