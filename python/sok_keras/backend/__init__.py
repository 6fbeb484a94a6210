"""One module for the framework behind Keras: the four calls of a training step in its own terms.

Each defines `lookup`, `commit` and `apply` (the push is the gradient of the lookup), `gather`, `scatter`, `sum_gradients`, `watch_gradients`, `bind_gpu`,
`after`, `wait`, `at_hand`, `has_wide_integers`, `eager_scope`, `gpu`, `constant`, `is_compiling`, `is_dense`, `is_tracing`, `to_numpy`
and `from_numpy`. A second module defines `TableState`, a base of the layers: how the framework itself saves rows.
`_native` is imported here and below alone: TensorFlow must load the library before Python does, to see its ops.
"""

import functools

import keras

name = keras.backend.backend()

if name == "tensorflow":
    import sok_keras.backend.tensorflow as framework
    import sok_keras.backend.tensorflow_state as state
elif name == "jax":
    import sok_keras.backend.jax as framework  # type: ignore[no-redef]
    import sok_keras.backend.jax_state as state  # type: ignore[no-redef]
elif name == "torch":
    import sok_keras.backend.torch as framework  # type: ignore[no-redef]
    import sok_keras.backend.torch_state as state  # type: ignore[no-redef]
else:
    raise ImportError(f"sok_keras runs on the Keras backends tensorflow, jax and torch. Received: {name!r}")

from sok_keras import _native as native  # noqa: E402
from sok_keras.backend.leaving import call_last as call_last  # noqa: E402

after = framework.after
apply = framework.apply
at_hand = framework.at_hand
commit = framework.commit
constant = framework.constant
eager_scope = framework.eager_scope
from_numpy = framework.from_numpy
gather = framework.gather
gpu = framework.gpu
has_wide_integers = framework.has_wide_integers
is_compiling = framework.is_compiling
is_dense = framework.is_dense
is_tracing = framework.is_tracing
lookup = framework.lookup
bind_gpu = framework.bind_gpu
prefetch = framework.prefetch
scatter = framework.scatter
sum_gradients = framework.sum_gradients
to_numpy = framework.to_numpy
wait = framework.wait
watch_gradients = framework.watch_gradients
TableState = state.TableState
if name == "tensorflow":
    import sok_keras.backend.tensorflow_shards as shards
    import sok_keras.backend.tensorflow_variables as variables
else:
    import sok_keras.backend.table_variables as shards  # type: ignore[no-redef]
    import sok_keras.backend.table_variables as variables  # type: ignore[no-redef]


@functools.cache
def keep_freed_memory():
    """Asks the C library to keep what a step frees for the next. PyTorch's arrays are of a size that glibc learns to keep."""
    if name in ("tensorflow", "jax"):
        native.keep_freed_memory()


__all__ = [
    "TableState",
    "after",
    "apply",
    "at_hand",
    "bind_gpu",
    "commit",
    "constant",
    "eager_scope",
    "from_numpy",
    "gather",
    "gpu",
    "has_wide_integers",
    "is_compiling",
    "is_dense",
    "is_tracing",
    "keep_freed_memory",
    "lookup",
    "name",
    "native",
    "prefetch",
    "scatter",
    "shards",
    "sum_gradients",
    "to_numpy",
    "variables",
    "wait",
    "watch_gradients",
]
