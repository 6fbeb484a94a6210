"""Sums over ranks of gradients of dense variables, which start while PyTorch's backward pass goes on.

The variables are divided into buckets, the last variable first, since the backward pass comes to it first. When the gradients of a
bucket are there, and the buckets before it have started, a thread sums it over all ranks, on the GPU in a stream of its own. So all
ranks sum the same buckets in the same order. What has not started when the optimizer asks for the sums starts then.

Only Keras' trainer makes use of it: it calls `Optimizer.scale_loss` right before the backward pass, which announces that `apply`
follows. In a loop of a user's own a backward pass may be of one rank alone.
"""

import concurrent.futures
import contextlib
import json
import os

import torch

from sok_keras import _native
from sok_keras.backend.private_keras import value_of

# A sum costs some 50 us beside what it moves.
_BUCKET_BYTES = 8 << 20


class GradientSums:
    """Sums of the gradients of some variables.

    Args:
        variables: Keras variables, the same on all ranks.
        reduce: Sums a flat float32 tensor over all ranks, and divides the sums.
    """

    def __init__(self, variables, reduce):
        self._reduce = reduce
        self._parameters = [value_of(variable) for variable in reversed(variables)]
        self._places = {id(variable): place for place, variable in enumerate(reversed(variables))}
        self._buckets = _buckets_of(self._parameters)
        self._bucket_of = {place: number for number, bucket in enumerate(self._buckets) for place in bucket}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "sok-sums")
        self._stream, self._process = None, os.getpid()
        self._is_expected = False
        self._reset()
        for place, parameter in enumerate(self._parameters):
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(lambda parameter, place=place: self._note(place, parameter))

    def _reset(self):
        # Gradients that were seen, as they were then.
        self._seen = {}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sums = []
        # Whether a gradient has changed after it was seen.
        self._is_stale = False

    def expect(self):
        """Sums what the next backward pass makes. `take` must follow on all ranks."""
        if torch.compiler.is_compiling() or self._process != os.getpid():  # a fork has no thread
            return
        self._finish()
        self._is_expected = True

    def take(self, gradients):
        """Returns gradients that are reduced, or None if they were not expected, or are not those of the backward pass on some rank.

        Args:
            gradients: Pairs of a gradient and its variable.

        Raises:
            RankError: If another rank has gradients of other variables, or fails.
        """
        if not self._is_expected:
            return None
        self._is_expected = False
        while len(self._sums) < len(self._buckets):
            self._start(self._buckets[len(self._sums)])
        places = [self._places.get(id(variable)) for _, variable in gradients]
        as_seen = not self._is_stale and all(
            place is not None and self._seen.get(place) == _version(gradient)
            for place, (gradient, _) in zip(places, gradients, strict=True)
        )
        own = json.dumps([as_seen, places])
        told = [json.loads(text) for text in _native.gather(own.encode())]
        for rank, (_, of_rank) in enumerate(told):
            if of_rank != places:
                raise _native.RankError(
                    f"rank {rank} has gradients of other variables than this one. All ranks must train the same model"
                )
        sums = self._finish()
        if not all(as_seen for as_seen, _ in told):
            return None
        return [sums[place].view(gradient.shape) for place, (gradient, _) in zip(places, gradients, strict=True)]

    def _note(self, place, parameter):
        """Notes that a gradient is there."""
        if not self._is_expected:
            return
        if place in self._seen:
            self._is_stale = True  # a second backward pass has added to it
            return
        self._seen[place] = _version(parameter.grad)
        self._missing[self._bucket_of[place]] -= 1
        while len(self._sums) < len(self._buckets) and not self._missing[len(self._sums)]:
            self._start(self._buckets[len(self._sums)])

    def _start(self, bucket):
        """Starts the sum of a bucket."""
        parameters = [self._parameters[place] for place in bucket]
        given = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in parameters]
        is_on_gpu = given[0].is_cuda
        if is_on_gpu and self._stream is None:
            self._stream = torch.cuda.Stream(given[0].device)
        there = torch.cuda.current_stream(given[0].device).record_event() if is_on_gpu else None
        self._sums.append(self._thread.submit(self._sum, given, there))

    def _sum(self, given, there):
        """Sums a bucket once `there` has come. Returns the sums, and the event of their completion."""
        with torch.cuda.stream(self._stream) if there else contextlib.nullcontext(), torch.no_grad():
            if there:
                self._stream.wait_event(there)
            sums = self._reduce(torch.cat([gradient.reshape(-1).float() for gradient in given]))
            return sums, self._stream.record_event() if there else None

    def _finish(self):
        """Waits for the sums that were started. Returns them by the place of their variable."""
        started, buckets = self._sums, self._buckets
        self._reset()
        sums = {}
        for bucket, future in zip(buckets, started, strict=False):
            flat, done = future.result()
            if done:
                stream = torch.cuda.current_stream(flat.device)
                stream.wait_event(done)
                flat.record_stream(stream)
            parts = flat.split([self._parameters[place].numel() for place in bucket])
            sums.update(zip(bucket, parts, strict=True))
        return sums


def _buckets_of(parameters):
    """Divides parameters, in their order, into lists of places of about equally many bytes."""
    buckets, num_bytes = [], _BUCKET_BYTES
    for place, parameter in enumerate(parameters):
        if num_bytes >= _BUCKET_BYTES or parameter.device != parameters[place - 1].device:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(place)
        num_bytes += 4 * parameter.numel()
    return buckets


def _version(gradient):
    """Identifies the numbers of a tensor: each change in place has another version."""
    return gradient.data_ptr(), gradient.shape, gradient._version
