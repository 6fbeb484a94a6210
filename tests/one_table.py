"""Layers with one table, and a step of them."""

import sok_keras as sok
from reference import apply_gradients, gradients

DIM = 4


def distributed(name="t", vocabulary_size=None, dim=DIM, layer_name=None, **options):
    """A layer with one table."""
    feature = {key: options.pop(key) for key in ("padding_key", "input_shape", "output_shape") if key in options}
    table = sok.TableConfig(name, vocabulary_size, dim, **options)
    return sok.DistributedEmbedding(sok.FeatureConfig("f", table, **feature), name=layer_name)


def table_of(layer):
    return layer.get_table() if isinstance(layer, sok.DynamicEmbedding) else next(iter(layer.get_tables().values()))


def train_step(layer, optimizer, loss, tensors=()):
    """One update by the gradient of `loss(*tensors)`; gives the gradients of the tensors."""
    layer.build()
    found, rest = gradients(loss, layer.trainable_variables, tensors)
    apply_gradients(optimizer, found, layer.trainable_variables)
    return rest
