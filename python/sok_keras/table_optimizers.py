"""The optimizers of tables that have one of their own."""

import json
from typing import Any

import keras
from keras import ops

from sok_keras.backend.private_keras import steps_of
from sok_keras.optimizers import core_rule

# What such an optimizer cannot have, since the model's optimizer does it for all variables.
_SHARED = ("global_clipnorm", "loss_scale_factor", "gradient_accumulation_steps", "use_ema")


def get_optimizer(optimizer: Any) -> Any:
    """Returns the Keras optimizer for an optimizer, its name or its config. None stays None.

    Raises:
        ValueError: If the core has no formula of it, or if it is a wrapper or has what only the model's optimizer can have.
    """
    if optimizer is None:
        return None
    optimizer = keras.optimizers.get(optimizer)
    if core_rule(optimizer) is None:
        raise ValueError(
            "`optimizer` of a table must be one of Keras' optimizers of which the core has a formula, or of `sok_keras.optimizers`, and "
            f"without a wrapper. Any other can be the model's. Received: optimizer={type(optimizer).__name__}"
        )
    for argument in _SHARED:
        if getattr(optimizer, argument):
            raise ValueError(
                f"`{argument}` must be set in the model's optimizer, whose value counts for all tables. Received: an `optimizer` of a table "
                f"with {argument}={getattr(optimizer, argument)!r}"
            )
    return optimizer


def optimizer_config(optimizer: Any) -> dict[str, Any] | None:
    """Returns an optimizer as a config that every backend can load."""
    if optimizer is None:
        return None
    config = keras.saving.serialize_keras_object(optimizer)
    # A class of the program that runs has no module.
    if (config["module"] or "").startswith("keras."):
        # PyTorch's own classes serialise under a module that other backends cannot load.
        config["module"], config["registered_name"] = "keras.optimizers", None
    return config


def core_update(optimizer: Any) -> str:
    """Returns the update of rows by an optimizer of their table as JSON."""
    return json.dumps(
        {
            "rule": core_rule(optimizer),
            "weight_decay": None if optimizer.weight_decay is None else float(optimizer.weight_decay),
            "clipvalue": optimizer.clipvalue or None,
            "clipnorm": optimizer.clipnorm or None,
        }
    )


def distinct(optimizers: Any) -> list:
    """Returns each optimizer once, in the order in which they come first. Tables may share one."""
    return list({id(optimizer): optimizer for optimizer in optimizers if optimizer is not None}.values())


def variables_of(optimizers: list) -> list:
    """Returns what these optimizers save: the numbers of their steps, and learning rates."""
    return [variable for optimizer in optimizers for variable in optimizer.variables]


def scalars_of(optimizer: Any, is_update: Any, factor: Any) -> list:
    """Returns the four scalars of a step: learning rate, step from 1 on, `is_update`, factor of the gradients."""
    step = ops.cast(ops.convert_to_tensor(optimizer.iterations), "float32") + 1.0
    rate = ops.cast(ops.convert_to_tensor(optimizer.learning_rate), "float32")
    return [rate, step, is_update, factor]


def count_update(optimizer: Any, is_update: Any) -> None:
    """Counts a step if it is an update. `is_update`: float32 `()`, 0 or 1."""
    count = steps_of(optimizer)
    count.assign_add(ops.cast(is_update, count.dtype))
