"""Names of Keras' JAX backend that are not public. `tests/backends/test_private_names.py` says what breaks without each."""

from keras.src.backend.jax.trainer import JAXTrainer

__all__ = ["JAXTrainer"]
