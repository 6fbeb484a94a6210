"""Keeps the weights of a model when a step of Keras' trainer for JAX fails. Only this file uses that trainer's private names.

The trainer takes the weights out of the variables and donates their memory to the compiled step. A step that fails, or Ctrl-C before
its result is stored, would leave a model without weights. For models with tables, this module changes two things:

- On the CPU, our calls in a compiled step do not fail. They belong to the model's *scope*, which remembers the first error
  (`crates/python/src/scope.rs`). The step then returns the state that it was given, and Python raises the error before the next
  step or at the end of `fit`. The choice between the two states is compiled into the step, so nothing is copied.
- The result of a step is stored before a signal handler may run, and is assigned to the variables however `fit` ends.
"""

import contextlib
import contextvars
import functools
import signal
import threading
import warnings
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sok_keras import _native
from sok_keras.backend.private_jax import JAXTrainer
from sok_keras.backend.private_keras import get_stateless_scope

_STATES = {
    2: ("trainable_variables", "non_trainable_variables"),
    3: ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    4: ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"),
}
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")

# The step that is being traced; None in a hand-written loop.
_traced: contextvars.ContextVar = contextvars.ContextVar("sok_keras_step", default=None)
# Scopes of models with tables that have been trained or evaluated.
_scopes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def traced_scope():
    """Number of the scope of the calls that are being traced. 0: none, so an error is an exception of XLA's."""
    step = _traced.get()
    return np.int64(0 if step is None else step.scope)


def _cores(model):
    """The tables of a model."""
    return [variable.sok_core for variable in model.variables if hasattr(variable, "sok_core")]


def _scope_of(model):
    """Returns the scope of a model; None if it has no tables."""
    if model not in _scopes and _cores(model):
        _scopes[model] = _native.Scope()
    return _scopes.get(model)


# ---- a compiled step


class _TracedStep(NamedTuple):
    scope: int
    # Values that `chosen_updates` returned.
    chosen: list


def _whole_step(model, step, scope, state, data):
    """Runs a step. Returns the new state, or the state that it was given if one of our calls has failed."""
    traced = _TracedStep(scope, [])
    token = _traced.set(traced)
    try:
        outputs, new = step(state, data)
    finally:
        _traced.reset(token)
    is_ok = _verdict(scope, _small_results(model, outputs, state, new))
    done = {id(value) for value in traced.chosen}
    new = tuple(_chosen(is_ok, *groups, done) for groups in zip(new, state, strict=True))
    return outputs, _finished(model, scope, is_ok, new) if len(new) == 4 else new


@contextlib.contextmanager
def chosen_updates(tickets_and_gradients):
    """A scope in which each update of a traced step is chosen by itself. Later updates start from the chosen value, so XLA needs no
    further pass over the weights."""
    traced, variables = _traced.get(), get_stateless_scope()
    if traced is None or variables is None:
        yield
        return
    is_ok = _verdict(traced.scope, [value[(0,) * value.ndim] for value in tickets_and_gradients if value.size])
    add_update = variables.add_update

    def add_chosen(update):
        variable, new = update
        old = variables.get_current_value(variable)
        if old is not None:
            (new,) = _chosen(is_ok, [new], [old], ())
            traced.chosen.append(new)
        add_update((variable, new))

    variables.add_update = add_chosen
    try:
        yield
    finally:
        del variables.add_update


def _small_results(model, outputs, old, new):
    """Returns the results of a step that depend on its calls, except for dense weights and their optimizer's variables."""
    results = [value for value, is_trigger in zip(new[0], _are_triggers(model), strict=False) if is_trigger]
    given = {id(value) for value in jax.tree.leaves(old)}
    others = jax.tree.leaves((new[1], new[3:] if len(new) == 4 else new[2:]))
    results += [value for value in others if id(value) not in given]
    results += jax.tree.leaves(outputs)
    return [value for value in results if not jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)]


def _are_triggers(model):
    return [hasattr(variable, "sok_core") for variable in model.trainable_variables]


def _verdict(scope, results):
    call = jax.ffi.ffi_call("sok_verdict", jax.ShapeDtypeStruct((), "int32"))
    return call(*results, scope=np.int64(scope)) == 1


def _chosen(is_ok, new, old, done):
    """Chooses between two lists of arrays, except for those whose id is in `done`."""

    def choice(new, old):
        return new if new is old or id(new) in done else jnp.where(is_ok, new, old)

    return list(map(choice, new, old))


def _finished(model, scope, is_ok, state):
    """Updates the rows. The triggers pass through it, so that the next lookup comes after it."""
    places = [place for place, is_trigger in enumerate(_are_triggers(model)) if is_trigger]
    call = jax.ffi.ffi_call("sok_finish", [jax.ShapeDtypeStruct((64, 2), "float32") for _ in places])
    triggers = call(is_ok.astype("int32"), *(state[0][place] for place in places), scope=np.int64(scope))
    trainable = list(state[0])
    for place, trigger in zip(places, triggers, strict=True):
        trainable[place] = trigger
    return (trainable, *state[1:])


# ---- steps as the trainer calls them


class _Steps:
    """Replaces a model's step, compiled or not, in the trainer."""

    def __init__(self, model, step):
        self._model, self._step, self._compiled = model, step, None
        self._compiles = type(step) is type(jax.jit(len))

    def __call__(self, state, data):
        if _scope_of(self._model) is None:
            return self._step(state, data)
        return self._run_compiled(state, data) if self._compiles else self._run_eagerly(state, data)

    def _compile(self, state):
        if not _is_on_cpu(state):
            return self._step
        # The function inside of what the trainer has jitted. JAX may have cached the jitted one with the scope of another model.
        step = self._step.__wrapped__
        return jax.jit(
            functools.partial(_whole_step, self._model, step, _scope_of(self._model).handle), donate_argnums=0
        )

    def _run_compiled(self, state, data):
        _raise_failure(self._model, state)
        self._compiled = self._compiled or self._compile(state)
        with _uninterrupted():
            outputs, state = self._compiled(state, data)
            _keep(self._model, state)
        return outputs, state

    def _run_eagerly(self, state, data):
        """Runs a step that is not compiled. Nothing is donated, so an error leaves the state as it was."""
        try:
            outputs, new = jax.block_until_ready(self._step(state, data))
        except Exception as error:
            for core in _cores(self._model):
                _raise_latched(core.group, error)
            raise
        _keep(self._model, new)
        return outputs, new


def _is_on_cpu(state):
    (value, *_) = jax.tree.leaves(state)
    return all(device.platform == "cpu" for device in value.devices())


def _raise_latched(group, cause):
    try:
        group.raise_latched()
    except Exception as error:
        raise error from cause


def _raise_failure(model, results):
    """Raises the error of a step by its own class, once. Steps that were started after it have changed nothing.

    `results`: of the newest step. All of them are ready together, when no step runs any more.
    """
    scope = _scopes[model]
    if scope.has_failed:
        with contextlib.suppress(Exception):  # another's
            jax.block_until_ready(results)
        scope.raise_error()


# ---- nothing is lost on the way


def _keep(model, state):
    """Stores the state of a model, which `jax_state_sync` assigns to its variables."""
    vars(model).update(_jax_state=dict(zip(_STATES[len(state)], state, strict=True)), _jax_state_synced=False)


@contextlib.contextmanager
def _uninterrupted():
    """A scope that delays Ctrl-C to its end. While a step is traced it is not delayed, since nothing is donated yet."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting = []

    def wait(number, frame):
        if _traced.get() is not None:
            handler(number, frame)
        waiting.append((number, frame))

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            handler(*waiting[0])


def _kept_state(get_state):
    """Wraps `_get_jax_state`, which takes the values out of the variables."""

    @functools.wraps(get_state)
    def get(model, *args, **kwargs):
        if _scope_of(model) is None:
            return get_state(model, *args, **kwargs)
        for core in _cores(model):
            core.trigger.check()  # later they would come back with the state
        with _uninterrupted():
            state = get_state(model, *args, **kwargs)
            _keep(model, state)
        return state

    return get


def _own_state_synced(sync):
    """Wraps `jax_state_sync`, which sets the variables to what the steps returned."""

    @functools.wraps(sync)
    def synced(model, *args, **kwargs):
        is_due = model in _scopes and not getattr(model, "_jax_state_synced", True)
        triggers = [core.trigger for core in _cores(model)] if is_due else []
        for trigger in triggers:
            trigger.is_own = True
        try:
            return sync(model, *args, **kwargs)
        finally:
            for trigger in triggers:
                trigger.is_own = False

    return synced


def _settled(call):
    """Wraps `fit` and the like: when it ends, variables have their values, and errors of the last steps are raised."""

    @functools.wraps(call)
    def settled(model, *args, **kwargs):
        try:
            result = call(model, *args, **kwargs)
        finally:
            if model in _scopes:
                with _uninterrupted():
                    model.jax_state_sync()
        if model in _scopes:
            triggers = [core.trigger.value for core in _cores(model)]
            with contextlib.suppress(Exception):  # `_raise_failure` raises it
                jax.block_until_ready(triggers)
            _raise_failure(model, triggers)
        return result

    return settled


def _guarded(make_function):
    """Wraps `_make_function`, which compiles a step."""

    @functools.wraps(make_function)
    def make(model, step_function, *args, **kwargs):
        return make_function(model, _Steps(model, step_function), *args, **kwargs)

    return make


def guard_trainer(trainer=JAXTrainer):
    """Wraps the trainer's methods, once."""
    wrappers = {"_make_function": _guarded, "_get_jax_state": _kept_state, "jax_state_sync": _own_state_synced}
    wrappers |= dict.fromkeys(_CALLS, _settled)
    missing = [name for name in wrappers if not hasattr(trainer, name)]
    if missing:
        warnings.warn(
            f"This version of Keras has no {', '.join(missing)} in its trainer for JAX. An error in a step, or Ctrl-C, may leave a "
            "model without its weights: dump it often, or use a version that sok_keras was tested with.",
            stacklevel=2,
        )
        return
    for name, wrapper in wrappers.items():
        setattr(trainer, name, wrapper(getattr(trainer, name)))
