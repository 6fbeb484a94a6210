"""Optimizers that Keras does not have, and the formulas of the core for those that it has."""

import keras
from keras import ops


def _add_row_states(optimizer, variables, name, initializer):
    """Adds a variable of one number for each row of each variable. Scalars have one number."""
    return [
        optimizer.add_variable(
            shape=(*v.shape[:-1], 1) if len(v.shape) else (),
            initializer=initializer,
            dtype=v.dtype,
            name=f"{v.name}_{name}",
        )
        for v in variables
    ]


def _row_mean_of_squares(gradient):
    squares = ops.square(gradient)
    return ops.mean(squares, axis=-1, keepdims=True) if len(gradient.shape) else squares


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
        self._accumulators = _add_row_states(self, variables, "accumulator", initializer)

    def update_step(self, gradient, variable, learning_rate):
        lr = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        accumulator = self._accumulators[self._get_variable_index(variable)]
        self.assign_add(accumulator, _row_mean_of_squares(gradient))
        self.assign_sub(variable, lr * gradient / ops.sqrt(accumulator + self.epsilon))

    def get_config(self):
        return {
            **super().get_config(),
            "initial_accumulator_value": self.initial_accumulator_value,
            "epsilon": self.epsilon,
        }


@keras.saving.register_keras_serializable(package="sok_keras")
class RowWiseAdam(keras.optimizers.Optimizer):
    """Adam with one second moment for each row instead of one for each element. Its states take about half of Adam's memory.

    As `keras.optimizers.Adam`, but the second moment is that of the mean of the squares of a row's gradient, over the last axis. This is
    FBGEMM's "partial row-wise Adam" (fbgemm_gpu, `PARTIAL_ROWWISE_ADAM`). Dense variables are updated in the same way; scalars have one
    second moment.

    Example:

    >>> optimizer = sok.OptimizerWrapper(sok.optimizers.RowWiseAdam(0.001))

    Args:
        learning_rate: float or schedule.
        beta_1: Decay of the first moment.
        beta_2: Decay of the second moment.
        epsilon: Added to the root of the second moment.
    """

    def __init__(self, learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7, name="row_wise_adam", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")
        self._velocities = _add_row_states(self, variables, "velocity", "zeros")

    def update_step(self, gradient, variable, learning_rate):
        dtype = variable.dtype
        lr, gradient = ops.cast(learning_rate, dtype), ops.cast(gradient, dtype)
        step = ops.cast(self.iterations + 1, dtype)
        corrections = [1 - ops.power(ops.cast(beta, dtype), step) for beta in (self.beta_1, self.beta_2)]
        alpha = lr * ops.sqrt(corrections[1]) / corrections[0]
        number = self._get_variable_index(variable)
        momentum, velocity = self._momentums[number], self._velocities[number]
        self.assign_add(momentum, (gradient - momentum) * (1 - self.beta_1))
        self.assign_add(velocity, (_row_mean_of_squares(gradient) - velocity) * (1 - self.beta_2))
        self.assign_sub(variable, momentum * alpha / (ops.sqrt(velocity) + self.epsilon))

    def get_config(self):
        return {**super().get_config(), "beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}


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
    "Adadelta": ("adadelta", ["rho", "epsilon"]),
    "Adamax": ("adamax", ["beta_1", "beta_2", "epsilon"]),
    "Nadam": ("nadam", ["beta_1", "beta_2", "epsilon"]),
    "RowWiseAdam": ("row_wise_adam", ["beta_1", "beta_2", "epsilon"]),
    "Lamb": ("lamb", ["beta_1", "beta_2", "epsilon"]),
}


def core_rule(optimizer):
    """Returns the core's formula for a Keras optimizer, with its hyper-parameters. None: the core has none for it.

    A subclass of one of Keras' optimizers may have another formula.
    """
    cls = type(optimizer)
    is_known = cls in (RowWiseAdagrad, RowWiseAdam) or cls.__module__.startswith("keras.")
    if not is_known or cls.__name__ not in _FORMULAS:
        return None
    name, hyper_parameters = _FORMULAS[cls.__name__]
    return {"name": name, **{each: getattr(optimizer, each) for each in hyper_parameters}}
