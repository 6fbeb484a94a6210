"""Metrics of all ranks, printed by one."""

from typing import Any

import keras
import numpy as np

from sok_keras import backend, distributed
from sok_keras.backend.private_keras import extend_metrics_result


class Distributed(keras.callbacks.Callback):
    """Makes what `fit` and `evaluate` report the metrics of all ranks' samples, and lets rank 0 alone print them.

    Put it first in `callbacks`, so that the others see the same metrics on all ranks and decide alike. Ranks must have equally many
    epochs. The state of a metric must be sums over samples, as that of Keras' own is: it is added over the ranks. Progress within an epoch
    shows rank 0's own samples. When training starts, all variables of the model get the values of rank 0. Without ranks it does nothing.

    Example:

    >>> model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), "mse")
    >>> history = model.fit(x, y, callbacks=[sok.callbacks.Distributed()], verbose=0)
    """

    def set_params(self, params: dict[str, Any]) -> None:
        super().set_params(params)
        if distributed.rank() > 0:
            params["verbose"] = 0  # the callbacks after this one are given the same dict

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if distributed.world_size() > 1:
            extend_metrics_result(model, _result_of_all)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        distributed.equalize([v for v in self.model.non_trainable_variables if v.dtype != "string"])


def _result_of_all(model, result):
    """Returns the results of metrics over the samples of all ranks. GPUs may round them differently, so all ranks take those of rank 0."""
    with _SummedMetrics(model):
        of_rank = result()
    return keras.tree.map_structure(lambda value: distributed.broadcast(keras.ops.convert_to_numpy(value)), of_rank)


class _SummedMetrics:
    """A scope in which the metrics of a model have the sums of their states over all ranks."""

    def __init__(self, model: Any) -> None:
        self._variables = [variable for metric in model.metrics for variable in metric.variables]

    def __enter__(self) -> None:
        self._own = [keras.ops.convert_to_numpy(variable.value) for variable in self._variables]
        flat = np.concatenate([np.ravel(value).astype("float64") for value in self._own]) if self._own else np.zeros(0)
        sums, start = distributed.all_reduce(flat), 0
        for variable, own in zip(self._variables, self._own, strict=True):
            end = start + own.size
            variable.assign(backend.from_numpy(sums[start:end].reshape(own.shape).astype(own.dtype)))
            start = end

    def __exit__(self, *error: object) -> None:
        for variable, own in zip(self._variables, self._own, strict=True):
            variable.assign(backend.from_numpy(own))
