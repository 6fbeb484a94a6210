"""The plan of a layer's calls."""

import math

from sok_keras.backend import native
from sok_keras.backend.handles import plans


class Plan:
    """Describes the tensors of a layer's calls: features, tables, forms of ids. It is made when a call is traced."""

    def __init__(self, core, features, row_dtype):
        self._native = native.Plan(core.group, features, row_dtype)
        # For each feature: its axis, its table's dim, and the places of its ids and row splits among all tensors.
        self._places, start = [], 0
        for _, table, words, axis, weights, scores, *_ in features:
            end = start + 1 + words + (axis == "ragged")
            self._places.append((axis, core.dims[table], start, end - 1))
            start = end + scores + weights
        self.num_features = len(features)
        # Dtype of the rows and of their gradients.
        self.row_dtype = row_dtype
        self.gpu = core.gpu
        self.handle = self._native.handle
        plans[self.handle] = self

    def shapes_of(self, tensors):
        """Shape of each feature's rows. `tensors`: for each feature its ids, then its row splits, its scores and its weights if it has them."""
        return [_rows_shape(axis, dim, tensors[ids], tensors[splits]) for axis, dim, ids, splits in self._places]

    def num_floats(self, inputs):
        """Number of floats in the rows of all ids; None if a shape is not known."""
        sizes = [tensors[0].shape for tensors in inputs]
        if any(length is None for shape in sizes for length in shape):
            return None
        return sum(dim * math.prod(shape) for shape, (_, dim, _, _) in zip(sizes, self._places, strict=True))

    def output_shapes(self, inputs):
        """Static shape of each feature's rows. Unknown axes are None."""
        pairs = zip(self._places, inputs, strict=True)
        return [_rows_shape(axis, dim, tensors[0], tensors[end - ids]) for (axis, dim, ids, end), tensors in pairs]


def _rows_shape(axis, dim, ids, splits):
    if axis == "ragged":
        (length,) = splits.shape
        return (None if length is None else length - 1, dim)
    return (*(ids.shape[:-1] if axis == "last" else ids.shape), dim)
