"""Imports embeddings of Keras and PyTorch."""

import os
from collections.abc import Mapping
from typing import Any

import keras as keras_
import numpy as np

from sok_keras.importers.pieces import import_pieces, pieces_of
from sok_keras.strings import string_keys
from sok_keras.table import Outcomes, Table


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
        ValueError: If the layer is not built, or the numbers of rows do not agree.
    """
    if isinstance(embedding, keras_.layers.Layer):
        if not embedding.built:
            raise ValueError(f"`embedding` must be built, so that it has rows. Received: {embedding}")
        embedding = keras_.ops.convert_to_numpy(embedding.embeddings)
    rows = np.asarray(embedding)
    if rows.ndim != 2 or rows.shape[1] != table.dim:
        raise ValueError(f"`embedding` must have rows of {table.dim} numbers. Received: an array of shape {rows.shape}")
    chosen, found = _keys_of(len(rows), vocabulary, keys)
    return import_pieces(table, pieces_of(found, rows if chosen is None else rows[chosen]), len(found), progress)


def _keys_of(num_rows: int, vocabulary: Any, keys: Any) -> tuple[Any, np.ndarray]:
    """Returns the rows that have a key, None for all, and their keys."""
    if vocabulary is not None and keys is not None:
        raise ValueError("`vocabulary` and `keys` both name the keys of rows: give one of them")
    if keys is not None:
        keys = np.asarray(keys)
        if keys.shape != (num_rows,):
            raise ValueError(
                f"`keys` must hold one key for each of {num_rows} rows. Received: an array of shape {keys.shape}"
            )
        return None, keys
    if vocabulary is None:
        return None, np.arange(num_rows)
    tokens, num_special = vocabulary, 0
    if isinstance(vocabulary, keras_.layers.Layer):
        tokens = vocabulary.get_vocabulary(include_special_tokens=True)
        num_special = len(tokens) - len(vocabulary.get_vocabulary(include_special_tokens=False))
    if len(tokens) > num_rows:
        raise ValueError(f"`vocabulary` must have at most {num_rows} tokens, one for each row. Received: {len(tokens)}")
    tokens = list(tokens)[num_special:]
    # Rows after those of the vocabulary are never looked up.
    chosen = np.arange(num_special, num_special + len(tokens))
    is_text = bool(tokens) and isinstance(tokens[0], str | bytes)
    return chosen, np.asarray(string_keys(tokens) if is_text else tokens, None if is_text else "int64")


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
        KeyError: If there is no such weight.
        ValueError: If a weight is not as wide as its table, or there are not as many keys as rows. All weights are checked before a table
            changes.
    """
    if isinstance(source, Mapping):
        weights = source
    else:
        import torch as torch_

        weights = torch_.load(source, map_location="cpu", weights_only=True, mmap=True)
    missing = [name for name in tables if name not in weights]
    if missing:
        raise KeyError(
            f"`source` must have the weights {sorted(tables)}. Received: one without {missing}, with {sorted(weights)}"
        )
    arrays = {name: _array(weights[name]) for name in tables}
    for name, table in tables.items():
        if arrays[name].ndim != 2 or arrays[name].shape[1] != table.dim:
            raise ValueError(
                f"Weight {name!r} must have rows of {table.dim} numbers. Received: shape {arrays[name].shape}"
            )
    found = {name: _keys_of(len(arrays[name]), None, (keys or {}).get(name))[1] for name in tables}
    return {
        name: import_pieces(table, pieces_of(found[name], arrays[name]), len(found[name]), progress)
        for name, table in tables.items()
    }


def _array(weight: Any) -> np.ndarray:
    """A weight as float32; its file stays mapped if it is float32 already."""
    if hasattr(weight, "detach"):
        weight = weight.detach().cpu()
        return (weight if str(weight.dtype) == "torch.float32" else weight.float()).numpy()
    return np.asarray(weight)
