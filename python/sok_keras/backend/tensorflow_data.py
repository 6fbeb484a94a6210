"""The part of a rank of a `tf.data.Dataset`."""

from typing import Any

import tensorflow as tf

from sok_keras.shares import Share


def shard_of_dataset(dataset: Any, share: Share) -> Any:
    """Returns the batches of a rank, `(x, y, sample_weight)`.

    Every group of `world_size` batches gives one to each rank. A group that has fewer batches, or batches of different size, is divided by
    samples.
    """
    rank, world_size = share

    def group_of(*parts):
        group = tf.data.Dataset.zip(parts)
        start = (tf.constant(tf.int64.max, tf.int64), tf.zeros((), tf.int64), tf.zeros((), tf.int64))
        least, num_batches, num_samples = group.reduce(start, _count)
        is_even = (num_batches == world_size) & (least * num_batches == num_samples)
        none = tf.zeros_like(num_batches)
        own = group.take(tf.where(is_even, num_batches, none)).skip(rank).take(1)
        merged = group.take(tf.where(is_even, none, num_batches)).unbatch().batch(tf.maximum(num_samples, 1))
        return own.concatenate(merged.map(lambda *batch: _divided(batch, rank, world_size)))

    batches = dataset.map(_with_weights).window(world_size).flat_map(group_of)
    num_batches = dataset.cardinality()
    if num_batches >= 0:
        batches = batches.apply(tf.data.experimental.assert_cardinality(-(-num_batches // world_size)))
    return batches.prefetch(tf.data.AUTOTUNE)


def _with_weights(x, y, *weights):
    return (x, y, weights[0] if weights else tf.ones(_num_samples(y), tf.float32))


def _num_samples(arrays):
    first = tf.nest.flatten(arrays)[0]
    return tf.shape(first, tf.int64)[:1]


def _count(counts, batch):
    least, num_batches, num_samples = counts
    size = _num_samples(batch[2])[0]
    return tf.minimum(least, size), num_batches + 1, num_samples + size


def _divided(batch, rank, world_size):
    x, y, weights = batch
    num_samples = _num_samples(weights)[0]
    size = -(-num_samples // world_size)
    indices = rank * size + tf.range(size)
    own = tf.minimum(indices, num_samples - 1)
    x, y, weights = tf.nest.map_structure(lambda array: tf.gather(array, own), (x, y, weights))
    counts = tf.reshape(tf.cast(indices < num_samples, weights.dtype), (-1, *[1] * (weights.shape.rank - 1)))
    return x, y, weights * counts
