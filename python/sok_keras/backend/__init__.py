"""One module for the framework behind Keras: the four calls of a training step in its own terms.

Each defines `lookup`, `commit` and `apply` (the push is the gradient of the lookup), `wait`, `at_hand`, `has_wide_integers`,
`eager_scope`, `gpu`, `constant` and `is_compiling`.
`_native` is imported here and below alone: TensorFlow must load the library before Python does, to see its ops.
"""

import functools

import keras

name = keras.backend.backend()

if name == "tensorflow":
    from sok_keras.backend.tensorflow import (
        apply,
        at_hand,
        commit,
        constant,
        eager_scope,
        gpu,
        has_wide_integers,
        is_compiling,
        lookup,
        wait,
    )
elif name == "jax":
    from sok_keras.backend.jax import (
        apply,
        at_hand,
        commit,
        constant,
        eager_scope,
        gpu,
        has_wide_integers,
        is_compiling,
        lookup,
        wait,
    )
elif name == "torch":
    from sok_keras.backend.torch import (
        apply,
        at_hand,
        commit,
        constant,
        eager_scope,
        gpu,
        has_wide_integers,
        is_compiling,
        lookup,
        wait,
    )
else:
    raise ImportError(f"sok_keras runs on the Keras backends tensorflow, jax and torch. Received: {name!r}")

from sok_keras import _native as native  # noqa: E402


@functools.cache
def keep_freed_memory():
    """Asks the C library to keep what a step frees for the next. PyTorch's arrays are of a size that glibc learns to keep."""
    if name in ("tensorflow", "jax"):
        native.keep_freed_memory()


__all__ = [
    "apply",
    "at_hand",
    "commit",
    "constant",
    "eager_scope",
    "gpu",
    "has_wide_integers",
    "is_compiling",
    "keep_freed_memory",
    "lookup",
    "name",
    "native",
    "wait",
]
