"""Any weighted subset of backward passes is applied as Keras would, or refused; never guessed.

A gradient of the trigger is a ticket: it names the pushes of the backward passes that made it, each with its weight. The core
keeps the newest 64 pushes, and an update drops those that are older than the oldest which it names.
"""

import keras
import numpy as np
import pytest

import sok_keras as sok
from reference import (
    BACKEND,
    BATCH,
    ON_GPU,
    apply_gradients,
    assert_close,
    assert_same_weights,
    assert_trains_alike,
    batches,
    gradients,
    model_gradients,
    our_embedding,
    raises,
    reference_embedding,
    rows_of,
    small_model,
    table_of,
    to_numpy,
    weights_of,
)

RING = 64


def all_of(*passes):
    return [(number, 1.0) for number in passes]


# Backward passes, then the updates: each a weighted sum of their gradients.
PLANS = {
    "one": (1, [all_of(0)]),
    "a_quarter_of_one": (1, [[(0, 0.25)]]),
    "fourth_of_five": (5, [all_of(3)]),
    "first_and_fourth_of_four": (4, [all_of(0, 3)]),
    "weighted_sum": (3, [[(0, 0.5), (1, -2.0), (2, 3.0)]]),
    "in_order": (3, [all_of(0), all_of(1), all_of(2)]),
    "newer_first": (3, [all_of(1), all_of(0), all_of(2)]),
    "interleaved": (4, [all_of(0, 2), all_of(1), all_of(3)]),
    "one_used_up_in_a_sum": (3, [all_of(1), all_of(1, 2), all_of(2)]),
    "twice_the_same": (2, [all_of(0), all_of(0), all_of(1)]),
    "last_of_seventy": (70, [all_of(69)]),
    "first_of_seventy": (70, [all_of(0), all_of(6)]),
    "all_of_seventy": (70, [all_of(*range(70)), all_of(*range(6, 70))]),
    "two_that_share_a_row": (70, [all_of(3, 67)]),
}


class Rule:
    """Which updates are allowed, in words that need no core."""

    def __init__(self, passes):
        self.pending = set(range(max(0, passes - RING), passes))

    def allows(self, group):
        named = {number for number, _ in group}
        if not named <= self.pending:
            return False
        self.pending = {number for number in self.pending - named if number > min(named)}
        return True


def weighted_sum(found, group):
    parts = [[gradient * weight for gradient in found[number]] for number, weight in group]
    return [sum(gradients[1:], gradients[0]) for gradients in zip(*parts, strict=True)]


def backward_passes(model, count):
    (ids,), targets = batches(count)
    pieces = [slice(start, start + BATCH) for start in range(0, len(ids), BATCH)]
    return [model_gradients(model, ids[piece], targets[piece]) for piece in pieces]


def pair(optimizer):
    """Our model and Keras', each with its optimizer."""
    ours, theirs = small_model(our_embedding()), small_model(reference_embedding())
    wrapped, plain = sok.OptimizerWrapper(optimizer()), optimizer()
    wrapped.build(ours.trainable_variables)
    plain.build(theirs.trainable_variables)
    return (ours, wrapped), (theirs, plain)


def snapshot(model, optimizer):
    variables = [] if ON_GPU else model.variables + optimizer.variables
    contents = table_of(model).export(states=True)
    return [contents.keys, contents.rows, *contents.states.values(), *map(to_numpy, variables)]


def assert_refused(model, optimizer, found):
    """Refused by a `TicketError` that changes nothing; a GPU tells when Keras has updated its own variables already."""
    before = snapshot(model, optimizer)
    with raises(sok.TicketError, "push is gone.*Nothing was changed", table_of(model)):
        apply_gradients(optimizer, found, model.trainable_variables)
    for now, then in zip(snapshot(model, optimizer), before, strict=True):
        np.testing.assert_array_equal(now, then)


def run(plan, optimizer):
    passes, groups = plan
    (ours, wrapped), (theirs, plain) = pair(optimizer)
    found, reference = backward_passes(ours, passes), backward_passes(theirs, passes)
    rule = Rule(passes)
    for group in groups:
        if rule.allows(group):
            apply_gradients(wrapped, weighted_sum(found, group), ours.trainable_variables)
            apply_gradients(plain, weighted_sum(reference, group), theirs.trainable_variables)
        else:
            assert_refused(ours, wrapped, weighted_sum(found, group))
    if ON_GPU:
        assert_close(weights_of(ours)[0], weights_of(theirs)[0])
    else:
        assert_same_weights(ours, theirs)
    assert table_of(ours).stats().pending_pushes == len(rule.pending)


@pytest.mark.parametrize("name", PLANS)
def test_updates_follow_the_tickets(name):
    run(PLANS[name], lambda: keras.optimizers.SGD(0.5))


def test_adam_sees_what_the_tickets_say():
    run((4, [[(0, 0.5), (2, 2.0)], all_of(1), all_of(3)]), lambda: keras.optimizers.Adam(0.02))


@pytest.mark.parametrize("seed", range(3))
def test_random_subsets_in_random_order_are_applied_or_refused(seed):
    random = np.random.default_rng(seed)
    passes = 8
    groups = [
        [
            (int(number), float(random.choice([-1.0, 0.5, 2.0])))
            for number in random.choice(passes, random.integers(1, 4), replace=False)
        ]
        for _ in range(6)
    ]
    run((passes, groups), lambda: keras.optimizers.SGD(0.1))


def test_ticket_of_an_earlier_turn_of_the_ring_is_refused():
    """Marks differ from one turn to the next, so that a stale ticket does not pass for that of a newer push in its row."""
    (ours, wrapped), _ = pair(lambda: keras.optimizers.SGD(0.01))
    (first,) = backward_passes(ours, 1)
    for _ in range(2):
        backward_passes(ours, RING)
        assert_refused(ours, wrapped, first)


def test_one_lookup_differentiated_twice_counts_twice():
    ids = np.array([[1, 2, 3]], "int32")

    def train(embedding, optimizer):
        embedding.build()
        optimizer.build(embedding.trainable_variables)
        found = [first + second for first, second in zip(*gradients_of_one_lookup(embedding, ids), strict=True)]
        apply_gradients(optimizer, found, embedding.trainable_variables)
        return rows_of(embedding)

    ours = train(our_embedding(), sok.OptimizerWrapper(keras.optimizers.SGD(0.1)))
    assert_close(ours, train(reference_embedding(), keras.optimizers.SGD(0.1)))


def gradients_of_one_lookup(layer, ids):
    """Gradients of the sum of the rows, and of three times that, from one forward pass."""
    values = [variable.value for variable in layer.trainable_variables]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            rows = tf.reduce_sum(layer(ids, training=True))
            scaled = 3.0 * rows
        return tape.gradient(rows, values), tape.gradient(scaled, values)
    if BACKEND == "torch":
        import torch

        rows = layer(ids, training=True).sum()
        return torch.autograd.grad(rows, values, retain_graph=True), torch.autograd.grad(3.0 * rows, values)
    import jax

    rows, backward = jax.vjp(lambda values: layer.stateless_call(values, [], ids, training=True)[0].sum(), values)
    return backward(1.0 * rows / rows)[0], backward(3.0 * rows / rows)[0]


# ---- two models on one table


def models_on_one_layer(embedding, wrap):
    models = [small_model(embedding) for _ in range(2)]
    optimizers = [wrap(keras.optimizers.SGD(0.5)) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    (ids,), targets = batches(1)
    found = [model_gradients(model, ids, targets) for model in models]
    return models, optimizers, found


def test_two_models_on_one_table_update_in_the_order_of_their_passes():
    def train(embedding, wrap):
        models, optimizers, found = models_on_one_layer(embedding, wrap)
        for model, optimizer, mine in zip(models, optimizers, found, strict=True):
            apply_gradients(optimizer, mine, model.trainable_variables)
        return models[1]

    assert_trains_alike(train)


def test_two_models_on_one_table_refuse_the_older_pass_after_the_newer():
    models, optimizers, found = models_on_one_layer(our_embedding(), sok.OptimizerWrapper)
    apply_gradients(optimizers[1], found[1], models[1].trainable_variables)
    assert_refused(models[0], optimizers[0], found[0])


def test_two_models_on_one_table_may_add_their_gradients():
    """The trigger is one variable of both; its gradients add up like those of any."""

    def train(embedding, wrap):
        models, optimizers, ((first, *_), (second, *rest)) = models_on_one_layer(embedding, wrap)
        apply_gradients(optimizers[1], [first + second, *rest], models[1].trainable_variables)
        return models[1]

    assert_trains_alike(train)


# ---- an optimizer that may not update


def layer_of_three():
    layer = sok.DynamicEmbedding(2)
    layer.get_table().assign([0, 1, 2], np.zeros((3, 2), "float32"))
    layer.build()
    return layer


def pushed(layer):
    """The gradient of a backward pass: 1 for each number of the rows."""
    given = keras.ops.convert_to_tensor(np.array([0, 1, 2], "int32"))
    return gradients(lambda: keras.ops.sum(layer(given, training=True)), layer.trainable_variables)[0]


def rows_in(layer):
    return layer.get_table().export().rows


def test_refused_apply_leaves_nothing_for_the_next():
    layer = layer_of_three()
    adam, sgd = (sok.OptimizerWrapper(o) for o in (keras.optimizers.Adam(0.1), keras.optimizers.SGD(1.0)))
    for optimizer in (adam, sgd):  # each binds itself
        apply_gradients(optimizer, pushed(layer), layer.trainable_variables)
    before = rows_in(layer)
    with raises(sok.SokError, "bound to another optimizer", layer.get_table()):
        apply_gradients(adam, pushed(layer), layer.trainable_variables)
    np.testing.assert_array_equal(rows_in(layer), before)
    apply_gradients(sgd, pushed(layer), layer.trainable_variables)
    np.testing.assert_allclose(rows_in(layer), before - 1, atol=1e-6)


def test_refused_apply_of_two_layers_moves_neither():
    layers = [layer_of_three(), layer_of_three()]
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    both, other = (sok.OptimizerWrapper(keras.optimizers.Adam(0.1)) for _ in range(2))
    both.build(variables)
    apply_gradients(other, pushed(layers[1]), layers[1].trainable_variables)
    before = [rows_in(layer) for layer in layers]
    with raises(sok.SokError, "bound to another optimizer", layers[1].get_table()):
        apply_gradients(both, [gradient for layer in layers for gradient in pushed(layer)], variables)
    if keras.backend.backend() == "jax":  # it is told by each of its layers
        with pytest.raises(sok.SokError, match="bound to another optimizer"):
            layers[0].get_table().synchronize()
    for layer, rows in zip(layers, before, strict=True):
        np.testing.assert_array_equal(rows_in(layer), rows)


def test_a_gradient_of_other_tables_is_refused():
    (model, optimizer), _ = pair(lambda: keras.optimizers.SGD(0.5))
    (other, _), _ = pair(lambda: keras.optimizers.SGD(0.5))
    backward_passes(model, 1)
    assert_refused(model, optimizer, backward_passes(other, 1)[0])
