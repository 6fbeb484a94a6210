"""Rows in PyTorch's state dicts.

Keras does not register layers as submodules. A model has its variables in a `ParameterDict`. A global hook on the registration of
parameters finds the module that holds a trigger, and hooks of that module add the rows to its state dict.
"""

import functools
import weakref

import keras
import numpy as np
import torch

from sok_keras.backend.private_torch import state_dict_hooks

# Layers whose triggers the registration hook looks for.
_layers: weakref.WeakSet = weakref.WeakSet()
_ROWS = ".rows."


class TableState:
    """Base of the layers that saves rows in the framework's own files."""

    def __call__(self, inputs, *args, **kwargs):
        # Keras reads the shape of each input. For a strided nested tensor, PyTorch raises an internal error then.
        if any(map(_is_strided_nested, keras.tree.flatten(inputs))):
            raise ValueError(
                f"Nested tensors of ids must have `layout=torch.jagged`. Received: layout torch.strided (layer {self.name!r})"
            )
        return super().__call__(inputs, *args, **kwargs)

    def _watch_state(self):
        _layers.add(self)


def _is_strided_nested(value):
    return isinstance(value, torch.Tensor) and value.is_nested and value.layout is torch.strided


def _layer_of(parameter):
    """Returns the layer whose trigger `parameter` is, or None."""
    if type(parameter) not in (torch.nn.Parameter, torch.Tensor) or parameter.is_meta:
        return None
    address = parameter.data_ptr()
    return next((layer for layer in _layers if layer.trigger.value.data_ptr() == address), None)


def _follow(module, name, parameter):
    layer = _layer_of(parameter)
    if layer is not None and not _is_followed(module, name):
        layer = weakref.ref(layer)
        module.register_state_dict_post_hook(functools.partial(_save, layer, name))
        module.register_load_state_dict_pre_hook(functools.partial(_load, layer, name))


def _is_followed(module, name):
    hooks = state_dict_hooks(module)
    return any(isinstance(hook, functools.partial) and hook.func is _save and hook.args[1] == name for hook in hooks)


torch.nn.modules.module.register_module_parameter_registration_hook(_follow)


def _save(layer, name, module, state, prefix, metadata):
    """Adds keys, rows and states to a state dict as tensors on the host."""
    del module, metadata
    layer, key = layer(), prefix + name
    # Compilers ask for the variables themselves and do not need rows.
    if layer is None or isinstance(state.get(key), torch.nn.Parameter | None):
        return
    for suffix, tensor in (_saved_already(key, state) or _tensors(layer)).items():
        state[key + _ROWS + suffix] = tensor


def _tensors(layer):
    return {name: torch.from_numpy(np.array(array)) for name, array in layer._rows_to_save().items()}


def _saved_already(key, state):
    """Returns the rows of another entry of the same trigger, since a model may hold its variables twice."""
    address = state[key].data_ptr()
    for other, value in state.items():
        if other != key and isinstance(value, torch.Tensor) and value.shape == state[key].shape:
            rows = _rows_of(other, state)
            if rows and value.data_ptr() == address:
                return rows
    return None


def _rows_of(key, state):
    start = key + _ROWS
    return {name[len(start) :]: state[name] for name in state if name.startswith(start)}


def _load(layer, name, module, state, prefix, metadata, strict, missing, unexpected, errors):
    """Takes rows out of a state dict into the tables; without them it is an error."""
    del module, metadata, strict, missing, unexpected
    layer, key = layer(), prefix + name
    if layer is None or key not in state:
        return
    rows = {suffix: tensor.detach().cpu().numpy() for suffix, tensor in _rows_of(key, state).items()}
    for suffix in rows:
        del state[key + _ROWS + suffix]
    try:
        layer._load_rows(rows, "state dict")
    except Exception as error:  # PyTorch raises all of them as one `RuntimeError`
        errors.append(f"{key}: {error}")
    # The trigger keeps its own value.
    state[key] = layer.trigger.value.detach()
