"""The tables of variables, which lookups read together."""

import weakref
from collections.abc import Sequence
from typing import Any

from sok_keras import backend
from sok_keras.backend.insertion import Insertion
from sok_keras.feature_config import FeatureConfig
from sok_keras.layers.distributed_embedding import DistributedEmbedding

# `DynamicVariable`s without tables.
waiting: list[weakref.ref] = []


class VariableTables:
    """The tables of variables that were made before one of them was used. One native call looks them all up."""

    def __init__(self, variables: list) -> None:
        configs = [variable._config for variable in variables]
        self._numbers = {id(variable): number for number, variable in enumerate(variables)}
        self.layer = DistributedEmbedding([FeatureConfig(config.name, config) for config in configs], name="variables")
        self.layer.build()
        backend.variables.keep_trigger(self.layer.trigger)
        self.core = self.layer._core
        if backend.name == "tensorflow":
            self.steps = backend.variables.Steps()  # type: ignore[attr-defined]

    @classmethod
    def make(cls) -> None:
        """Makes the tables of all variables that have none yet."""
        variables = [variable for variable in (reference() for reference in waiting) if variable is not None]
        by_storage: dict[str, list] = {variable._config.storage: [] for variable in variables}
        for variable in variables:
            by_storage[variable._config.storage].append(variable)
        for together in by_storage.values():
            tables = cls(together)
            for variable in together:
                variable._tables = tables
            waiting[:] = [one for one in waiting if one() is not None and one()._tables is None]  # type: ignore[union-attr]
            for variable in together:
                variable._fill()

    def present_trigger(self) -> Any:
        """Returns the present value of the trigger, on JAX or PyTorch."""
        if backend.name == "jax":
            if backend.framework.is_in_trace():  # type: ignore[attr-defined]
                raise ValueError(
                    "`triggers` must be given in a function that JAX traces, as an argument of the function. Received: triggers=None"
                )
            # A loop has values of its own, so the lookup does not depend on its last step.
            self.core.wait_for_steps()
        return self.layer.trigger.value

    def number_of(self, variable: Any) -> int:
        return self._numbers[id(variable)]

    def plan(
        self,
        variables: Sequence,
        weights: list,
        axes: Sequence[str],
        combiners: Sequence[str],
        padding_keys: Sequence[int | None] | None = None,
    ) -> Any:
        """Returns the plan of lookups of these variables."""
        of_features = zip(variables, weights, axes, combiners, padding_keys or [None] * len(variables), strict=True)
        features = tuple(
            (variable.name, self.number_of(variable), False, axis, weight is not None, False, combiner, padding_key)
            for variable, weight, axis, combiner, padding_key in of_features
        )
        return self.core.plan(features)

    def lookup(self, plan: Any, inputs: list, weights: list, trigger: Any, learns: bool, insertion: Insertion) -> list:
        """Looks up rows.

        Args:
            plan: What `plan` gives.
            inputs: For each variable a tuple of tensors.
            weights: For each variable weights or None.
            trigger: The value of the trigger.
            learns: Whether gradients will come.
            insertion: When ids without a row get one.
        """
        if learns:
            self._note(plan, inputs)
        return backend.lookup(plan, trigger, learns, inputs, weights, insertion)

    def call(
        self,
        variables: Sequence,
        inputs: list,
        weights: list,
        axes: Sequence[str],
        combiners: Sequence[str],
        insertion: Insertion,
    ) -> Any:
        """Returns a lookup of these variables on TensorFlow, of which gradients may come."""
        plan = self.plan(variables, weights, axes, combiners)
        self._note(plan, inputs)
        return backend.variables.Call(plan, inputs, weights, list(combiners), insertion)  # type: ignore[attr-defined]

    def _note(self, plan: Any, inputs: list) -> None:
        if backend.is_tracing(inputs[0][0]) and not backend.is_compiling():
            self.core.note_traced_call(plan, inputs)
