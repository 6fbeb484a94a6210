"""The optimizer of a model with embedding tables. Keras updates the dense variables, the core updates the rows."""

import json
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from sok_keras import backend, distributed
from sok_keras.backend.handles import optimizers
from sok_keras.backend.private_keras import (
    accumulated_gradient,
    clipping_by,
    count_step,
    steps_of,
    uses_weight_decay,
)
from sok_keras.general import GeneralUpdate
from sok_keras.optimizers import core_rule
from sok_keras.static_variables import Variable
from sok_keras.table_optimizers import (
    core_update,
    count_update,
    distinct,
    optimizer_config,
    scalars_of,
    variables_of,
)
from sok_keras.variables import with_triggers


def _core_of(variable: Any) -> Any:
    """Returns the tables of a trigger; None for other variables."""
    return getattr(variable, "sok_core", None)


@backend.constant
def _world_size() -> int:
    return distributed.world_size()


def _as_float(value: Any) -> Any:
    return ops.cast(ops.convert_to_tensor(value), "float32")


def _tensor(value: Any) -> Any:
    return value if ops.is_tensor(value) else ops.convert_to_tensor(value, dtype="float32")


def _merged(gradient: Any, variable: Any) -> Any:
    """Returns the gradient of a `Variable` with one entry a row. A tape concatenates the gradients of several lookups, so a row may occur twice."""
    if not isinstance(variable, Variable) or not hasattr(gradient, "dense_shape"):
        return gradient
    num_rows, dim = variable.shape
    return backend.variables.merged(gradient.indices, gradient.values, dim, num_rows)


def _divided(gradient: Any, divisor: int) -> Any:
    """Returns a gradient, which may be `tf.IndexedSlices`, divided by a number."""
    if not hasattr(gradient, "dense_shape"):
        return gradient / divisor
    return type(gradient)(gradient.values / divisor, gradient.indices, gradient.dense_shape)


def _whole(gradient: Any, variable: Any) -> Any:
    """Returns the gradient of all elements of a variable. It may be `tf.IndexedSlices`."""
    if not hasattr(gradient, "dense_shape"):
        return gradient
    return ops.scatter(ops.expand_dims(gradient.indices, 1), gradient.values, tuple(variable.shape))


def _sum_of_squares(tensors: list) -> Any:
    total = ops.zeros((), "float32")
    for tensor in tensors:
        total = total + ops.sum(ops.square(ops.cast(tensor, "float32")))
    return total


@keras.saving.register_keras_serializable(package="sok_keras")
class OptimizerWrapper(keras.optimizers.Optimizer):
    """Trains embedding tables and Keras variables with one Keras optimizer.

    The wrapped optimizer updates the dense variables. The core updates the rows of a batch by the same formula, after it has summed
    the gradients of equal ids. Rows that are not in the batch do not change, and neither do their states ("lazy" updates), unless
    `update_mode` says so.

    The core has the formulas of Keras' SGD, Adam, AdamW, Adamax, Nadam, Adagrad, Adadelta, RMSprop, Ftrl and Lion, and those of
    `sok_keras.optimizers`. Any other optimizer, such as a subclass of your own, works if it computes each element of a variable by itself:
    from its gradient, states of the variable's shape that start at a constant, and `self.iterations`. Then its own `update_step` is
    called with the rows of the batch, cut into flat pieces, which takes several times as long.

    Learning rate, schedules, clipping, weight decay, loss scale and gradient accumulation are those of the wrapped optimizer.
    Clipping by global norm counts the summed gradients of rows and the dense gradients together. Decoupled weight decay applies to
    the rows that a step updates. `use_ema` averages dense variables only.

    Example:

    >>> optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(1e-3, global_clipnorm=1.0))
    >>> model.compile(optimizer, "binary_crossentropy")

    Args:
        inner_optimizer: A Keras optimizer, or its name.
        update_mode: Which rows a step updates. `"local"`: those of the batch. `"global"`: all rows, as a dense variable does; those that
            are not in the batch have a gradient of zero, so with momentum they go on moving, and moments and weights decay. A step
            then takes a time that grows with the tables. `"lazy_global"`: the same values, but a row takes the steps that it has
            missed when it is read next: by a lookup of any kind, a dump, or a method of a table. Where a gradient of zero changes nothing
            (SGD without momentum, Adagrad, `RowWiseAdagrad`, all without weight decay), the three are the same. Only for optimizers whose
            formula the core has.
        gradient_reduction: How the gradients of ranks become one: `"mean"`, `"sum"`, or None to leave dense gradients to a framework
            that reduces them; the gradients of rows are summed then. Without ranks it has no effect.
        name: Name of the optimizer.

    Raises:
        ValueError: If `update_mode` or `gradient_reduction` is another value, or `update_mode` is not `"local"` and the core has no formula
            of `inner_optimizer`. If the formula of `inner_optimizer` needs the whole variable (Muon,
            Adafactor), or it keeps other states. If it is an `OptimizerWrapper` or a `LossScaleOptimizer`. A loss scale goes around the
            wrapper: `LossScaleOptimizer(OptimizerWrapper(Adam()))`. `compile` adds it for `mixed_float16`.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        update_mode: str = "local",
        gradient_reduction: str | None = "mean",
        name: str | None = None,
    ) -> None:
        inner = keras.optimizers.get(inner_optimizer) if inner_optimizer is not None else None
        if not isinstance(inner, keras.optimizers.Optimizer):
            raise ValueError(
                f"`inner_optimizer` must be a Keras optimizer or its name. Received: inner_optimizer={inner_optimizer!r}"
            )
        if type(inner).__name__ == "MultiOptimizer":
            raise ValueError(
                "`inner_optimizer` must be one optimizer: a `MultiOptimizer` goes around the wrapper, which takes the layers of this package "
                f"there. Received: {inner!r}"
            )
        if isinstance(inner, OptimizerWrapper | keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "`inner_optimizer` must be a plain optimizer; a `LossScaleOptimizer` goes around the wrapper, and `compile` puts "
                f"it there for mixed_float16. Received: {type(inner).__name__}"
            )
        if update_mode not in ("local", "global", "lazy_global"):
            raise ValueError(
                f'`update_mode` must be "local", "global" or "lazy_global". Received: update_mode={update_mode!r}'
            )
        if gradient_reduction not in ("mean", "sum", None):
            raise ValueError(
                f'`gradient_reduction` must be "mean", "sum" or None. Received: gradient_reduction={gradient_reduction!r}'
            )
        rule = core_rule(inner)
        general = GeneralUpdate(inner) if rule is None else None
        if general and update_mode != "local":
            raise ValueError(
                f'`update_mode` must be "local" for an optimizer whose formula the core does not have. Received: '
                f"update_mode={update_mode!r} with {type(inner).__name__}"
            )
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner
        self.update_mode = update_mode
        self.gradient_reduction = gradient_reduction
        self._rule = json.dumps(general.rule if general else rule)
        self._tables = _Binding()
        self._tables.general = general
        # All variables are saved under this optimizer, so that a file can wait until it is built.
        inner.save_own_variables = lambda store: None
        inner.load_own_variables = lambda store: None

    # ---- what the inner optimizer is

    @property
    def variables(self) -> list:
        return self._variables + self.inner_optimizer.variables + variables_of(self._tables.others)

    @property
    def learning_rate(self) -> Any:
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> Any:
        """The loss scale of the wrapped optimizer. A `LossScaleOptimizer` sets it to None."""
        return self.inner_optimizer.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        # Keras sets it in its own `__init__`, before there is a wrapped optimizer.
        if "inner_optimizer" in self.__dict__:
            self.inner_optimizer.loss_scale_factor = value

    def scale_loss(self, loss: Any) -> Any:
        if self._tables.sums is not None:
            self._tables.sums.expect()
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: list) -> None:
        for variable in var_list:
            if _core_of(variable) is not None:
                _core_of(variable).synchronize()
        self.inner_optimizer.finalize_variable_values([v for v in var_list if _core_of(v) is None])

    def build(self, variables: list) -> None:
        """Builds the inner optimizer and binds the tables of the triggers among `variables`, whose records get its states.

        States of another optimizer are reset. States that were loaded are kept if they fit and no optimizer was bound before, or if variables
        of this optimizer were loaded too.
        """
        if self.built:
            return
        variables = with_triggers([None] * len(variables), variables)[1]
        inner = self.inner_optimizer
        dense = [v for v in variables if _core_of(v) is None]
        copied = [v for v in dense if not isinstance(v, Variable)]
        needs_norm = bool(inner.clipnorm or inner.global_clipnorm)
        if inner.loss_scale_factor and len(copied) < len(dense):
            raise ValueError(
                "`loss_scale_factor` must be None for a `sok_keras.Variable`; put a `LossScaleOptimizer` around the optimizer. Received: "
                f"loss_scale_factor={inner.loss_scale_factor!r}"
            )
        if needs_norm and len(copied) < len(dense) and _world_size() > 1:
            raise ValueError(
                "`clipnorm` and `global_clipnorm` must be None for a `sok_keras.Variable` of many ranks, each of which has the gradients of "
                f"its own rows. Received: clipnorm={inner.clipnorm!r}, global_clipnorm={inner.global_clipnorm!r}"
            )
        with backend.eager_scope():
            distributed.equalize(copied)
        inner.build(dense)
        super().build(variables)
        if self._sums_over_ranks() and copied:
            self._tables.sums = backend.watch_gradients(copied, self._divisor())
        triggers = [v for v in variables if _core_of(v) is not None]
        updates = [self.update_for(trigger) for trigger in triggers]
        cores = [_core_of(trigger) for trigger in triggers]
        frozen = [name for core in cores for name in core.frozen]
        if frozen and self.update_mode != "local" and any(json.loads(update)["weight_decay"] for update in updates):
            raise ValueError(
                f"`update_mode={self.update_mode!r}` with weight decay moves all rows of a layer, so its tables must be trainable. Put others into a "
                f"layer with `trainable=False`. Received: tables {frozen} with `trainable=False`"
            )
        with backend.eager_scope():
            for core in cores:
                core.synchronize()  # a step of the optimizer before may still be under way
            if self._tables.general and cores:
                decays = [json.loads(update)["weight_decay"] or 0.0 for update in updates]
                row_types = [config["row_type"] for core in cores for config in core.configs]
                self._tables.general.build(cores[0].gpu, decays, row_types)
        for core, update in zip(cores, updates, strict=True):
            core.warn_of_lost_states(update)
        others = [optimizer for core in cores for optimizer in core.table_optimizers]
        if len(distinct([inner, *others])) <= len(others):
            raise ValueError(
                "An optimizer can be that of several tables of one layer, but not of several layers, or also the model's, since each step would "
                "count several times. Make another one of its config"
            )
        self._tables.others = others
        with backend.eager_scope():
            for optimizer in others:
                optimizer.build([])
        if cores:
            rows = {id(optimizer): row for row, optimizer in enumerate(others, 1)}
            own = [[(core_update(o), rows[id(o)]) for o in core.table_optimizers] for core in cores]
            self._tables.native = backend.native.Optimizer(
                [core.group for core in cores],
                updates,
                needs_norm,
                (inner.gradient_accumulation_steps or 1) > 1,
                own,
                self.update_mode,
                self._tables.waiting is not None,
            )
            self._tables.handle = self._tables.native.handle
            self._tables.gpu = cores[0].gpu
            optimizers[self._tables.handle] = self._tables
        for core in cores:
            core.optimizer = self._tables.native
        self._tables.cores = cores
        waiting, self._tables.waiting = self._tables.waiting, None
        if waiting is not None:
            with backend.eager_scope():  # TensorFlow builds while it traces: else each step would load them again
                self._take(*waiting)

    def update_for(self, trigger: Any) -> str:
        """Returns the update of the rows of a trigger as JSON. `trigger` is None for a layer that is not built yet."""
        inner = self.inner_optimizer
        decays = inner.weight_decay is not None and trigger is not None and uses_weight_decay(inner, trigger)
        return json.dumps(
            {
                "rule": json.loads(self._rule),
                "weight_decay": float(inner.weight_decay) if decays else None,
                "clipvalue": inner.clipvalue or None,
                "clipnorm": inner.clipnorm or None,
            }
        )

    # ---- the step

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        if not self.built:
            self.build(list(trainable_variables))
        grads, trainable_variables = with_triggers(grads, list(trainable_variables))
        self._check_variables_are_known(trainable_variables)
        pairs = list(zip(grads, trainable_variables, strict=True))
        tickets = {id(_core_of(v)): (g, v) for g, v in pairs if _core_of(v) is not None and g is not None}
        dense = [(_merged(g, v), v) for g, v in pairs if _core_of(v) is None and g is not None]
        if not tickets and not dense:
            raise ValueError(
                f"No gradients provided for any variable. Received: variables {[getattr(v, 'path', v.name) for v in trainable_variables]}"
            )
        self._leave_tables_of_others(tickets)
        dense, is_update = self._reduce(dense, self._is_update(), [_tensor(ticket) for ticket, _ in tickets.values()])
        clip, done = self._apply_to_tables(tickets, dense, is_update) if tickets else (None, [])
        with backend.after(done, [gradient for gradient, _ in dense]):
            self._apply_to_variables(dense, clip)

    def _leave_tables_of_others(self, tickets: dict) -> None:
        """Leaves the tables that another optimizer was built for since, unless they have a gradient in this step.

        On PyTorch, Keras builds the compiled optimizer with all variables of the model, also with those that another one trains.
        """
        tables = self._tables
        kept = [
            number for number, core in enumerate(tables.cores) if core.optimizer is tables.native or id(core) in tickets
        ]
        if len(kept) == len(tables.cores):
            return
        tables.native = tables.native.part(kept)
        tables.handle = tables.native.handle
        optimizers[tables.handle] = tables
        tables.cores = [tables.cores[number] for number in kept]
        for core in tables.cores:
            core.optimizer = tables.native

    def _is_update(self) -> Any:
        """Returns whether this step is an update, `(1,)` float32: not if gradients are only accumulated."""
        inner = self.inner_optimizer
        count = ops.convert_to_tensor(steps_of(inner))
        is_update = ops.equal(ops.mod(count + 1, inner.gradient_accumulation_steps or 1), 0)
        return ops.reshape(_as_float(is_update), (1,))

    def _sums_over_ranks(self) -> bool:
        return _world_size() > 1 and self.gradient_reduction is not None

    def _divisor(self) -> int:
        return _world_size() if self.gradient_reduction == "mean" else 1

    def _reduce(self, dense: list, is_update: Any, tickets: list) -> tuple:
        """Reduces dense gradients over the ranks, after all tickets are there, so that all ranks make their calls in the same order.

        Returns the gradients, and `is_update`, which comes after them.
        """
        if not self._sums_over_ranks() or not dense:
            return dense, is_update
        # The gradients of these are those of all ranks already.
        of_shards = [(_divided(g, self._divisor()), v) for g, v in dense if isinstance(v, Variable)]
        dense = [(g, v) for g, v in dense if not isinstance(v, Variable)]
        if not dense:
            return of_shards, is_update
        reduced = None if self._tables.sums is None else self._tables.sums.take(dense)
        if reduced is None:
            reduced, is_update = self._reduce_at_once(dense, is_update, tickets)
        pairs = zip(reduced, dense, strict=True)
        means = [(ops.cast(part, _tensor(gradient).dtype), variable) for part, (gradient, variable) in pairs]
        return means + of_shards, is_update

    def _reduce_at_once(self, dense: list, is_update: Any, tickets: list) -> tuple:
        """Reduces gradients over the ranks as one vector."""
        gradients = [_tensor(gradient) for gradient, _ in dense]
        flat = ops.concatenate([ops.reshape(_as_float(gradient), (-1,)) for gradient in gradients])
        flat, is_update = backend.sum_gradients(flat, is_update, tickets)
        flat, reduced, start = flat / self._divisor(), [], 0
        for gradient in gradients:
            end = start + int(np.prod(gradient.shape))
            reduced.append(ops.reshape(flat[start:end], tuple(gradient.shape)))
            start = end
        return reduced, is_update

    def _apply_to_tables(self, tickets: dict, dense: list, is_update: Any) -> tuple:
        """Updates rows. Returns the factor by which global clipping scales dense gradients, or None, and the new triggers."""
        inner, tables = self.inner_optimizer, self._tables
        # Read before the inner optimizer advances them.
        steps = inner.gradient_accumulation_steps or 1
        factor = ops.convert_to_tensor(
            1.0 / steps / self._divisor() / (inner.loss_scale_factor or 1.0), dtype="float32"
        )
        step, learning_rate = _as_float(inner.iterations) + 1.0, _as_float(inner.learning_rate)

        given = [tickets.get(id(core)) for core in tables.cores]
        named = [ops.zeros((64, 2), "float32") if pair is None else _tensor(pair[0]) for pair in given]
        sum_of_squares = backend.commit(tables, is_update, named)
        clip, due = None, ops.reshape(is_update, ())
        others = [scalar for other in tables.others for scalar in scalars_of(other, due, factor)]
        if inner.global_clipnorm:
            total = sum_of_squares * ops.square(factor) + _sum_of_squares(self._dense_means(dense, steps))
            clip = self._global_clip(ops.sqrt(total))
            factor = factor * clip
        scalars = ops.stack([learning_rate, step, due, factor, *others])
        for other in tables.others:
            count_update(other, due)
        if tables.general:
            sum_of_squares = tables.general.run(tables, scalars, sum_of_squares, is_update)
        triggers = [core.trigger.variable for core in tables.cores]
        values = [ops.convert_to_tensor(trigger.value) for trigger in triggers]
        new = backend.apply(tables, scalars, sum_of_squares, values)
        for core, trigger in zip(tables.cores, new, strict=True):
            core.trigger.advance(trigger)
        return clip, new

    def _global_clip(self, norm: Any) -> Any:
        """Returns the factor of Keras' `clip_by_global_norm`: NaN if the norm is not finite."""
        limit = self.inner_optimizer.global_clipnorm
        return limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)

    def _dense_means(self, dense: list, steps: int) -> list:
        """Dense gradients as the inner optimizer will clip them: unscaled, and the mean over accumulated steps."""
        inner = self.inner_optimizer
        grads = [_as_float(_whole(*pair)) / (inner.loss_scale_factor or 1.0) for pair in dense]
        if steps == 1:
            return grads
        sums = [_as_float(accumulated_gradient(inner, v)) for _, v in dense]
        return [(grad + total) / steps for grad, total in zip(grads, sums, strict=True)]

    def _apply_to_variables(self, dense: list, clip: Any) -> None:
        inner = self.inner_optimizer
        if not dense:
            count_step(inner)
            return
        with clipping_by(inner, clip):
            inner.apply(*map(list, zip(*dense, strict=True)))

    # ---- saving

    def save_own_variables(self, store: Any) -> None:
        store["rule"] = np.frombuffer(self._rule_name().encode(), "uint8")
        for number, variable in enumerate(self.variables):
            store[str(number)] = ops.convert_to_numpy(variable.value)

    def load_own_variables(self, store: Any) -> None:
        values = {name: ops.convert_to_numpy(store[name]) for name in store.keys()}  # noqa: SIM118
        rule = values.pop("rule", None)
        name = None if rule is None else bytes(rule.astype("uint8")).decode()
        if self.built:
            self._take(values, self, name)
        else:
            self.load_when_built(values, self, name)  # Keras would skip them

    def load_when_built(self, values: dict, owner: Any, rule: str | None = None) -> None:
        """Keeps values until the first build.

        Args:
            values: By the number of the variable.
            owner: Whose variables they are: this optimizer, or the loss scale around it.
            rule: Name of the optimizer's formula; None: not known.
        """
        self._tables.waiting = values, owner, rule

    def _take(self, values: dict, owner: Any, rule: str | None) -> None:
        """Sets the variables, all or none."""
        own = {str(number): variable for number, variable in enumerate(owner.variables)}
        shapes = [{name: tuple(v.shape) for name, v in named.items()} for named in (values, own)]
        if shapes[0] != shapes[1] or rule not in (None, self._rule_name()):
            warnings.warn(
                f"The file's optimizer has other variables than this one, so none of them were loaded. Expected: {len(own)} of "
                f"{self._rule_name()}. Received: {len(values)} of {rule or 'an optimizer that the file does not name'}",
                stacklevel=3,
            )
            return
        for name, variable in own.items():
            variable.assign(values[name])

    def _rule_name(self) -> str:
        rule = json.loads(self._rule)
        return rule.get("class", rule["name"])

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": optimizer_config(self.inner_optimizer),
            "update_mode": self.update_mode,
            "gradient_reduction": self.gradient_reduction,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict | None = None) -> "OptimizerWrapper":
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **config)


class _Binding:
    """The optimizer's part in the core, kept from Keras, which would track what is in it."""

    def __init__(self) -> None:
        self.native: Any = None
        self.handle = 0
        self.gpu: int | None = None
        self.cores: list = []
        # The optimizers of tables that have one of their own.
        self.others: list = []
        # What updates rows if the core has no formula for the optimizer.
        self.general: GeneralUpdate | None = None
        # What sums dense gradients during the backward pass, if anything does.
        self.sums: Any = None
        self.waiting: tuple | None = None


def SGD(lr: Any = 0.001) -> OptimizerWrapper:
    """Stochastic gradient descent for variables, as in SparseOperationKit: the gradients of all ranks are added up.

    Args:
        lr: Learning rate, or a schedule.

    Returns:
        `OptimizerWrapper(keras.optimizers.SGD(lr), gradient_reduction="sum")`.
    """
    return OptimizerWrapper(keras.optimizers.SGD(lr), gradient_reduction="sum")
