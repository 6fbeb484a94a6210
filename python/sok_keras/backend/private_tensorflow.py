"""Names of TensorFlow that are not public. `tests/backends/test_private_names.py` says what breaks without each."""

import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, VariableSpec, variable_accessed

__all__ = [
    "ResourceVariable",
    "Trackable",
    "op_wrappers",
    "restore_by",
    "should_record_backprop",
    "tracing_type",
    "variable_accessed",
]

Trackable = tf.__internal__.tracking.Trackable


def op_wrappers(names):
    """Source of the Python functions that call registered ops."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.framework import _pywrap_python_op_gen, op_def_registry

    definitions = op_def_pb2.OpList(op=[op_def_registry.get(name) for name in names])
    return _pywrap_python_op_gen.GetPythonWrappers(definitions.SerializeToString())


def restore_by(variable, restore):
    """A `tf.train.Checkpoint` calls `restore` with the variable's tensors, by name. It does not assign them."""
    variable._restore_from_tensors = restore


def tracing_type(variable, context):
    """The type by which a `tf.function` knows a variable among its arguments. It is traced anew for another variable."""
    alias = ("sok_keras", variable.handle._id)
    context.add_placeholder(alias, variable)
    return VariableSpec(variable.shape, variable.dtype, variable.trainable, alias_id=alias)
