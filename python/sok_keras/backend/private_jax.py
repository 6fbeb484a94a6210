"""Names of JAX and of Keras' JAX backend that are not public. `tests/backends/test_private_names.py` says what breaks without each."""

from jax._src.core import trace_ctx, trace_state_clean
from jax._src.distributed import global_state as distributed_state
from jax._src.xla_bridge import backends_are_initialized
from keras.src.backend.jax.trainer import JAXTrainer

__all__ = ["JAXTrainer", "backends_are_initialized", "distributed_state", "is_traced_now", "trace_state_clean"]


def is_traced_now(tracer):
    """Whether the function that is being traced may use this value: a function may not use values of functions that it calls."""
    return tracer._trace is trace_ctx.trace
