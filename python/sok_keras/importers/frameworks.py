"""Imports embeddings of Keras and PyTorch."""

import os
from collections.abc import Mapping
from typing import Any

import keras as keras_
import numpy as np

from sok_keras.importers.pieces import check_table, import_source, on_all_ranks, reading, source_of
from sok_keras.strings import string_keys
from sok_keras.table import Outcomes, Table, as_keys


def keras(embedding: Any, table: Table, *, vocabulary: Any = None, keys: Any = None, progress: bool = True) -> Outcomes:
    """Imports the rows of a `keras.layers.Embedding`.

    Example:

    >>> import sok_keras as sok
    >>> embedding = keras.layers.Embedding(3, 4)
    >>> embedding.build()
    >>> layer = sok.DynamicEmbedding(4)
    >>> layer.build()
    >>> sok.importers.keras(embedding, layer.get_table(), progress=False).inserted
    3
    >>> layer.get_table().keys().tolist()
    [0, 1, 2]

    Args:
        embedding: A built layer, or an array of its rows, `(n, dim)`.
        table: Where the rows go.
        vocabulary: A `StringLookup` or `IntegerLookup` layer in front of the embedding, or the list of its vocabulary: row i is that of
            `vocabulary[i]`. Strings become the keys that `sok_keras.string_keys` gives them. Its mask and out-of-vocabulary tokens have no
            key, so their rows are left out. None: row i is that of id i.
        keys: The keys of the rows, `(n,)`, instead of a vocabulary.
        progress: Whether a progress bar is shown.

    Returns:
        The `Outcomes` of the keys.

    Raises:
        TypeError: If keys are not integers, `embedding` is another layer, or `table` is not a `Table`.
        ValueError: If the layer is not built or is quantized, the numbers of rows do not agree, or a key is outside a static table; the
            pieces before it were imported then.
        TableFullError: If the table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    keys, rows = on_all_ranks(lambda: _rows_of(embedding, check_table(table), vocabulary, keys))
    return import_source(table, source_of(keys, rows), progress)


def _rows_of(embedding: Any, table: Table, vocabulary: Any, keys: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and the rows that have one."""
    if isinstance(embedding, keras_.layers.Layer):
        if not isinstance(embedding, keras_.layers.Embedding):
            raise TypeError(
                f"`embedding` must be a `keras.layers.Embedding` or an array. Received: {type(embedding).__name__}"
            )
        if not embedding.built:
            raise ValueError(f"`embedding` must be built, so that it has rows. Received: {embedding}")
        if embedding.quantization_mode is not None:
            raise ValueError(
                "`embedding` must not be quantized, since its rows are integers then. Received: "
                f"quantization_mode={embedding.quantization_mode!r}"
            )
        embedding = keras_.ops.convert_to_numpy(embedding.embeddings)
    rows = np.asarray(embedding)
    if rows.ndim != 2 or rows.shape[1] != table.dim:
        raise ValueError(f"`embedding` must have rows of {table.dim} numbers. Received: an array of shape {rows.shape}")
    if vocabulary is not None and keys is not None:
        raise ValueError("`vocabulary` and `keys` both name the keys of rows: give one of them")
    if vocabulary is None:
        return _keys_of(len(rows), keys), rows
    tokens, num_special = vocabulary, 0
    if isinstance(vocabulary, keras_.layers.Layer):
        tokens = vocabulary.get_vocabulary(include_special_tokens=True)
        num_special = len(tokens) - len(vocabulary.get_vocabulary(include_special_tokens=False))
    if len(tokens) > len(rows):
        raise ValueError(
            f"`vocabulary` must have at most {len(rows)} tokens, one for each row. Received: {len(tokens)}"
        )
    # Rows after those of the vocabulary are never looked up.
    tokens, rows = list(tokens)[num_special:], rows[num_special : len(tokens)]
    is_text = bool(tokens) and isinstance(tokens[0], str | bytes)
    return as_keys(string_keys(tokens) if is_text else tokens), rows


def _keys_of(num_rows: int, keys: Any) -> np.ndarray:
    """Returns the keys of all rows."""
    if keys is None:
        return np.arange(num_rows)
    keys = as_keys(keys)
    if len(keys) != num_rows:
        raise ValueError(f"`keys` must hold one key for each of {num_rows} rows. Received: {len(keys)}")
    return keys


def torch(
    source: str | os.PathLike | Mapping[str, Any],
    tables: Mapping[str, Table],
    *,
    keys: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[str, Outcomes]:
    """Imports weights of PyTorch's `Embedding` or `EmbeddingBag`, or of TorchRec's tables, from a state dict.

    Example:

    >>> import sok_keras as sok
    >>> layer = sok.DynamicEmbedding(4)
    >>> layer.build()
    >>> state_dict = {"users.weight": np.ones((3, 4), "float32")}
    >>> sok.importers.torch(state_dict, {"users.weight": layer.get_table()}, progress=False)["users.weight"].inserted
    3

    Args:
        source: A state dict, or a file that `torch.save` has written of one. Sharded tensors of TorchRec must be gathered before, as
            `torch.distributed.checkpoint` and FSDP's full state dicts do.
        tables: By the name of a weight, such as `"embedding_bags.users.weight"`, the table that takes its rows.
        keys: By the name of a weight, the keys of its rows, `(n,)`. A weight without keys has those from 0 on.
        progress: Whether a progress bar is shown.

    Returns:
        By name of the weight, the `Outcomes` of the keys.

    Raises:
        KeyError: If there is no such weight, or `keys` has others than `tables`.
        TypeError: If keys are not integers, or `tables` is not a dict of tables.
        ValueError: If a weight is not as wide as its table, or there are not as many keys as rows. All weights are checked before a table
            changes. Also if a key is outside a static table; the pieces before it were imported then.
        TableFullError: If a table is full, and its `check_mode` is `"raise"`. The pieces before were imported.
    """
    named = {name: check_table(table) for name, table in tables.items()} if isinstance(tables, Mapping) else None
    if named is None:
        raise TypeError(f"`tables` must be a dict of names of weights and tables. Received: {type(tables).__name__}")
    sources = on_all_ranks(lambda: _weights(source, named, keys or {}))
    return {name: import_source(named[name], source_of(*arrays), progress) for name, arrays in sources.items()}


def _weights(
    source: Any, tables: Mapping[str, Table], keys: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the keys and rows of each weight."""
    if not isinstance(source, Mapping):
        import torch as torch_

        with reading(source, "a file of `torch.save`"):
            source = torch_.load(source, map_location="cpu", weights_only=True, mmap=True)
    missing = [name for name in tables if name not in source]
    if missing:
        raise KeyError(
            f"`source` must have the weights {sorted(tables)}. Received: one without {missing}, with {sorted(source)}"
        )
    if set(keys) - set(tables):
        raise KeyError(f"`keys` must be those of weights in `tables`, {sorted(tables)}. Received: {sorted(keys)}")
    arrays = {name: _array(source[name]) for name in tables}
    for name, table in tables.items():
        if arrays[name].ndim != 2 or arrays[name].shape[1] != table.dim:
            raise ValueError(
                f"Weight {name!r} must have rows of {table.dim} numbers. Received: shape {arrays[name].shape}"
            )
    return {name: (_keys_of(len(array), keys.get(name)), array) for name, array in arrays.items()}


def _array(weight: Any) -> np.ndarray:
    """A weight as float32; its file stays mapped if it is float32 already."""
    if hasattr(weight, "detach"):
        weight = weight.detach().cpu()
        return (weight if str(weight.dtype) == "torch.float32" else weight.float()).numpy()
    return np.asarray(weight)
