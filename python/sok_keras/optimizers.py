"""Optimizers that Keras does not have, and the formulas of the core for those that it has."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="sok_keras")
class RowWiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad with one accumulator for each row instead of one for each element. Its states take `1 / dim` of the memory.

    `accumulator += mean(gradient ** 2)` over the last axis, then
    `variable -= learning_rate * gradient / sqrt(accumulator + epsilon)`. The mean over the row is that of FBGEMM's "exact row-wise
    Adagrad" (fbgemm_gpu, `EXACT_ROWWISE_ADAGRAD`). Epsilon is inside of the square root, as in Keras' Adagrad. Dense variables are
    updated in the same way; scalars have one accumulator.

    Example:

    >>> optimizer = sok.OptimizerWrapper(sok.optimizers.RowWiseAdagrad(0.01))

    Args:
        learning_rate: float or schedule.
        initial_accumulator_value: First value of the accumulators.
        epsilon: Added under the root.
    """

    def __init__(
        self, learning_rate=0.001, initial_accumulator_value=0.1, epsilon=1e-7, name="row_wise_adagrad", **kwargs
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        initializer = keras.initializers.Constant(self.initial_accumulator_value)
        self._accumulators = [
            self.add_variable(
                shape=(*v.shape[:-1], 1) if len(v.shape) else (),
                initializer=initializer,
                dtype=v.dtype,
                name=f"{v.name}_accumulator",
            )
            for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        lr = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        accumulator = self._accumulators[self._get_variable_index(variable)]
        squares = ops.square(gradient)
        self.assign_add(accumulator, ops.mean(squares, axis=-1, keepdims=True) if len(variable.shape) else squares)
        self.assign_sub(variable, lr * gradient / ops.sqrt(accumulator + self.epsilon))

    def get_config(self):
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }


# By the name of the optimizer's class: the formula's name in the core, and the hyper-parameters that it reads.
_FORMULAS = {
    "SGD": ("sgd", ["momentum", "nesterov"]),
    "Adam": ("adam", ["beta_1", "beta_2", "epsilon", "amsgrad"]),
    "AdamW": ("adam", ["beta_1", "beta_2", "epsilon", "amsgrad"]),
    "Adagrad": ("adagrad", ["initial_accumulator_value", "epsilon"]),
    "RowWiseAdagrad": ("row_wise_adagrad", ["initial_accumulator_value", "epsilon"]),
    "RMSprop": ("rmsprop", ["rho", "momentum", "epsilon", "centered"]),
    "Ftrl": (
        "ftrl",
        [
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        ],
    ),
    "Lion": ("lion", ["beta_1", "beta_2"]),
}


def core_rule(optimizer):
    """Returns the core's formula for a Keras optimizer, with its hyper-parameters.

    Raises:
        ValueError: If the core has no formula for the optimizer, or for a subclass of one of Keras' optimizers.
    """
    cls = type(optimizer)
    is_known = cls is RowWiseAdagrad or cls.__module__.startswith("keras.")
    if not is_known or cls.__name__ not in _FORMULAS:
        raise ValueError(
            f"`inner_optimizer` must be one whose formula the core has: {', '.join(sorted(_FORMULAS))}. "
            f"Received: {cls.__module__}.{cls.__name__}"
        )
    name, hyper_parameters = _FORMULAS[cls.__name__]
    return {"name": name, **{each: getattr(optimizer, each) for each in hyper_parameters}}
