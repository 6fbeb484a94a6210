"""Tells a layer the ids of a later batch."""

from typing import Any

from sok_keras.layers.distributed_embedding import DistributedEmbedding
from sok_keras.layers.dynamic_embedding import DynamicEmbedding


def prefetch(layer: DynamicEmbedding | DistributedEmbedding, inputs: Any) -> None:
    """Tells a layer the ids of its next training batch, before the step on the current batch.

    Ranks that share tables on GPUs then make these ids distinct and find their owners beside the current step. Results never depend on
    it: if other ids come, their lookup does all by itself. Tell batches in the order in which they are trained on, at most two ahead. It is
    not collective: ranks need not all call it. It pays where a GPU has idle time, as with small batches or slow input; a GPU that is always busy gains nothing.

    It does nothing without ranks, for tables in the memory of the host, on TensorFlow, for static tables that raise an error for unknown
    ids, and for ids that are ragged, have weights, or are pooled with a padding id by "mean" or "sqrtn".

    Example:

    >>> layer = sok.DynamicEmbedding(4)
    >>> batches = [np.array([3, 5], "int32"), np.array([5, 7], "int32")]
    >>> sok.prefetch(layer, batches[0])
    >>> for number, batch in enumerate(batches):
    ...     if number + 1 < len(batches):
    ...         sok.prefetch(layer, batches[number + 1])
    ...     rows = layer(batch, training=True)

    Args:
        layer: A `DynamicEmbedding` or `DistributedEmbedding`.
        inputs: Ids, in the form and of the shape that the layer will be called with.

    Raises:
        ValueError: If `layer` is another layer, or if it is called while a step is traced.
        DeviceError: If the GPU does not have enough memory.
    """
    if not isinstance(layer, DynamicEmbedding | DistributedEmbedding):
        raise ValueError(f"`layer` must be a DynamicEmbedding or a DistributedEmbedding. Received: {layer!r}")
    layer._prefetch(inputs)
