"""Refuses to trace a layer for an export format that cannot hold tables.

A layer cannot ask what it is traced for, so exporters are recognised by the names of their modules. If a module is renamed, the export
succeeds and the exported graph raises an error when it runs, because it does not find its tables.
"""

import sys

from sok_keras import backend
from sok_keras.backend.private_keras import EXPORTERS

_TRACERS = EXPORTERS | {
    "torch.onnx": "ONNX",
    "tf2onnx": "ONNX",
    "jax2onnx": "ONNX",
    "openvino": "OpenVINO",
    "tensorflow.lite.python": "LiteRT",
    "litert_torch": "LiteRT",
    "jax.experimental.jax2tf": "a SavedModel of JAX",
    "torch_xla": "StableHLO",
}


def _format():
    """Returns the format that a caller traces the model for if it cannot hold tables, else None."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for tracer, written in _TRACERS.items():
            if name == tracer or name.startswith(f"{tracer}."):
                return written
        frame = frame.f_back
    return None


@backend.constant
def check_format(layer: str) -> bool:
    """Returns True, because a compiler expects a value.

    Raises:
        SokError: If the layer is traced for a format that cannot hold tables.
    """
    written = _format()
    if written is not None:
        raise backend.native.SokError(
            f"{written} cannot hold embedding tables: it can neither call them nor take their rows along. Serve the Keras model: "
            "`model.save` and `keras.models.load_model`, or `sok_keras.dump` and `sok_keras.load`; or export what comes after the "
            f"tables as a model of its own. Received: an export of layer {layer!r}"
        )
    return True
