"""Names of Keras' PyTorch backend and of PyTorch that are not public. `tests/backends/test_private_names.py` says what breaks without each."""

from keras.src.backend.torch.core import get_device

__all__ = ["get_device", "state_dict_hooks"]


def state_dict_hooks(module):
    """The hooks that a module calls after its state dict is made."""
    return module._state_dict_hooks.values()
