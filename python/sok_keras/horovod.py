"""The names of `horovod.tensorflow` that training loops use, over the ranks of this package.

A program that was written for Horovod imports this module instead: `import sok_keras.horovod as hvd`.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed
from sok_keras.distributed import local_rank, rank, size

__all__ = [
    "Average",
    "DistributedGradientTape",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]

Average = "mean"
Sum = "sum"


def init() -> None:
    """Connects the ranks, as `sok_keras.init` without arguments, which may be called after it."""
    distributed.init_for_horovod()


def is_initialized() -> bool:
    """Whether `init` has been called, or the ranks were connected otherwise."""
    return distributed.is_for_horovod() or distributed.is_initialized()


def shutdown() -> None:
    """Does nothing: ranks leave when the process ends."""


def allreduce(tensor: Any, average: bool | None = None, name: str | None = None, op: str | None = None) -> Any:
    """Returns the mean of a tensor over all ranks, or the sum, on each rank.

    Args:
        tensor: A tensor of floats, or `tf.IndexedSlices`, which are made dense. All ranks give the same shape.
        average: Whether it is the mean, if there is no `op`. None: it is.
        name: Not needed.
        op: `Average` or `Sum`.

    Raises:
        ValueError: If `op` is another one, or the dtype is not float32, float16 or bfloat16.
    """
    del name
    op = op or (Sum if average is False else Average)
    if op not in (Average, Sum):
        raise ValueError(f"`op` must be `Average` or `Sum`. Received: op={op!r}")
    tensor = backend.variables.dense(tensor)
    if keras.backend.standardize_dtype(tensor.dtype) not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"`tensor` must be of floats of at most 32 bits. Received: dtype {tensor.dtype}")
    if size() == 1:
        return tensor
    flat = keras.ops.cast(keras.ops.reshape(tensor, (-1,)), "float32")
    sums, _ = backend.sum_gradients(flat, keras.ops.zeros((1,), "float32"))
    return keras.ops.cast(keras.ops.reshape(sums, keras.ops.shape(tensor)), tensor.dtype) / (
        size() if op == Average else 1
    )


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Returns the tensors of all ranks one after the other, along their first axis. It must be called eagerly."""
    del name
    return keras.ops.convert_to_tensor(np.concatenate(distributed.gather_arrays(keras.ops.convert_to_numpy(tensor))))


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """Returns the tensor of a rank on all ranks. It must be called eagerly."""
    del name
    return keras.ops.convert_to_tensor(distributed.broadcast(keras.ops.convert_to_numpy(tensor), root_rank))


def broadcast_variables(variables: Sequence[Any], root_rank: int) -> None:
    """Gives dense variables the values that they have on a rank."""
    own = [variable.name for variable in variables if _is_own(variable)]
    if own:
        raise TypeError(
            f"Ranks have rows of their own of variables of this package: give dense variables. Received: {own}"
        )
    for variable in variables:
        variable.assign(distributed.broadcast(keras.ops.convert_to_numpy(variable), root_rank))


class DistributedGradientTape:
    """A `tf.GradientTape` whose gradients of dense variables are means over all ranks.

    Args:
        gradtape: A `tf.GradientTape`.
        op: `Average` or `Sum`.
    """

    def __init__(self, gradtape: Any, *, op: str = Average) -> None:
        self._tape, self._op = gradtape, op

    def __enter__(self) -> "DistributedGradientTape":
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, output_gradients: Any = None) -> Any:
        """Returns the gradients, reduced over the ranks. Gradients of variables of this package are not reduced."""
        gradients = self._tape.gradient(target, sources, output_gradients)
        if not isinstance(sources, list | tuple):
            return self._reduced(gradients, sources)
        return [self._reduced(gradient, source) for gradient, source in zip(gradients, sources, strict=True)]

    def _reduced(self, gradient: Any, source: Any) -> Any:
        return gradient if gradient is None or _is_own(source) else allreduce(gradient, op=self._op)


def _is_own(variable: Any) -> bool:
    return isinstance(variable, backend.variables.TableVariable | backend.shards.ShardVariable)
