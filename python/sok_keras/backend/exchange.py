"""Arrays of which each rank gets a part."""

import numpy as np

from sok_keras import _native as native


def exchange_parts(arrays, counts, error=None):
    """Sends parts of arrays to the ranks. All ranks call it.

    Args:
        arrays: Arrays `(n, ...)`; the part for rank 0 comes first. All ranks give as many, of the same dtypes and row shapes.
        counts: For each array the lengths of its parts, int64 `(ranks,)`.
        error: What this rank fails with instead.

    Returns:
        The arrays of received parts, that of rank 0 first; then for each array the lengths of these parts.

    Raises:
        SokError: If a rank fails.
        RankError: If another rank does not come within the timeout, or is lost.
    """
    ends = [np.cumsum(lengths) for lengths in counts]

    def part(rank):
        lengths = np.array([of_array[rank] for of_array in counts], "int64")
        parts = [
            np.ascontiguousarray(array[end[rank] - length : end[rank]]).tobytes()
            for array, end, length in zip(arrays, ends, lengths, strict=True)
        ]
        return b"".join([lengths.tobytes(), *parts])

    messages = native.exchange([part(rank) for rank in range(len(counts[0]))], error)
    received = [[] for _ in arrays]
    for message in messages:
        lengths = np.frombuffer(message, "int64", len(arrays))
        start = lengths.nbytes
        for found, array, length in zip(received, arrays, lengths, strict=True):
            size = int(length) * int(np.prod(array.shape[1:]))
            found.append(np.frombuffer(message, array.dtype, size, start).reshape(length, *array.shape[1:]))
            start += found[-1].nbytes
    lengths = [np.array([len(part) for part in parts], "int64") for parts in received]
    return [*(np.concatenate(parts) for parts in received), *lengths]
