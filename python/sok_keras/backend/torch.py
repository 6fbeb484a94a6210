"""The calls of a training step as PyTorch operations.

They hand addresses of contiguous CPU tensors to the core; nothing is copied. The backward keeps the gradient tensors alive
until they are applied, so that one pass merges and updates.
"""

import contextlib

import numpy as np
import torch

from sok_keras import _native

_DTYPES = {torch.int32: 0, torch.int64: 1, torch.uint32: 2, torch.uint64: 3, torch.float32: 4}


def has_wide_integers():
    """Whether tensors hold 64-bit ids."""
    return True


def _address(tensor):
    return tensor.data_ptr(), _DTYPES[tensor.dtype], tensor.shape


def _host(tensor):
    return tensor.detach().to("cpu").contiguous()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, trigger, plan, insert, save, inputs, shapes, *weights):
        ctx.plan, ctx.device = plan, trigger.device
        given = [None if w is None else _host(w) for w in weights]
        tensors = [_host(t) for ids, w in zip(inputs, given, strict=True) for t in (*ids, w) if t is not None]
        number = torch.empty(2, dtype=torch.int32)
        rows = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        _native.lookup(plan.handle, insert, save, [*map(_address, tensors)], [*map(_address, (number, *rows))])
        ctx.number, ctx.weights = number, given
        return tuple(row.to(ctx.device) for row in rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        gradients = [_host(gradient) for gradient in gradients]
        given = [weight for weight in ctx.weights if weight is not None]
        ticket = torch.empty(64, 2, dtype=torch.float32)
        found = [torch.empty_like(weight) for weight in given]
        inputs = [*map(_address, (ctx.number, *gradients, *given))]
        _native.push(ctx.plan.handle, inputs, gradients, [*map(_address, (ticket, *found))])
        rest = iter(found)
        weights = [None if weight is None else next(rest).to(ctx.device) for weight in ctx.weights]
        return ticket.to(ctx.device), None, None, None, None, None, *weights


def lookup(plan, trigger, learns, inputs, weights, insert):
    """Rows of each feature, differentiable in `trigger` and `weights`.

    Args:
        plan: The layer's plan: has `handle` and `output_shapes(inputs)`.
        trigger: Value of the layer's trigger, `(64, 2)` float32.
        learns: Whether gradients are to come back; if not, nothing is differentiable.
        inputs: A tuple for each feature: its ids.
        weights: A float32 tensor or None for each feature.
        insert: Whether keys without a row get one; None: if a gradient is being recorded.

    Returns:
        A list with a float32 tensor for each feature.
    """
    shapes = plan.output_shapes(inputs)
    if inputs[0][0].is_meta:  # Keras asks for shapes alone
        return [torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes]
    if not learns:
        trigger, weights = trigger.detach(), [None if w is None else w.detach() for w in weights]
    records = torch.is_grad_enabled() and (
        trigger.requires_grad or any(w is not None and w.requires_grad for w in weights)
    )
    insert = (records and trigger.requires_grad) if insert is None else insert
    return list(_Lookup.apply(trigger, plan, insert, records, inputs, shapes, *weights))


def commit(optimizer, is_update, tickets):
    """Squared norm of all merged gradients that `tickets` name: a float32 scalar."""
    inputs = [_host(tensor) for tensor in (is_update, *tickets)]
    sum_of_squares = torch.empty((), dtype=torch.float32)
    _native.commit(optimizer.handle, [*map(_address, inputs)], [_address(sum_of_squares)])
    return sum_of_squares.to(tickets[0].device)


def apply(optimizer, scalars, sum_of_squares, triggers):
    """Updates the rows; gives the new value of each trigger."""
    inputs = [_host(tensor) for tensor in (scalars, sum_of_squares, *triggers)]
    new = [torch.empty(64, 2, dtype=torch.float32) for _ in triggers]
    _native.apply(optimizer.handle, [*map(_address, inputs)], [*map(_address, new)])
    return [tensor.to(triggers[0].device) for tensor in new]


def eager_scope():
    """A scope in which assignments happen now, also while a step is traced."""
    return contextlib.nullcontext()


def wait(trigger):
    """Nothing is under way when a call has returned."""
    del trigger


def at_hand(value):
    """A value as a NumPy array; None if it has to come from another device."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy() if value.device.type == "cpu" else None
    return value if isinstance(value, np.ndarray) else None
