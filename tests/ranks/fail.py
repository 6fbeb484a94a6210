"""Ranks of which rank 1 fails in a step: by a signal, in each phase of it, by an exception, or by a call that the others do not make."""

import os
import signal
import sys
import time

import numpy as np
from seeds import draw_seeds_from
from train import OPTIMIZERS, batches, make_model, share

import sok_keras as sok

TIMEOUT = 10
PHASES = ("before the lookup", "after the lookup", "in the backward pass", "before the update", "after the update")


def main(folder, how):
    sok.init(timeout=TIMEOUT)
    draw_seeds_from(0)
    model, tables = make_model("float32", OPTIMIZERS["adam"]())
    try:
        for step, (inputs, targets) in enumerate(batches()):
            part = {name: share(ids) for name, ids in inputs.items()}
            if step == 3:
                started = time.monotonic()
                if sok.rank() == 1:
                    fail(how, model, part)
            model.train_on_batch(part, share(targets))
            sok.barrier()
    except Exception as error:
        seconds = time.monotonic() - started
        if sok.rank() == 1:
            raise
        assert "RankError" in repr(error) + str(error) and "rank 1" in str(error), repr(error)
        assert seconds < TIMEOUT + 10, seconds
        # What this rank has is still there.
        rows = sum(len(table.export(local=True).keys) for table in tables)
        assert rows > 0
        try:
            sok.dump(os.path.join(folder, "dump"), model)
        except sok.RankError:
            np.save(os.path.join(folder, f"heard{sok.rank()}.npy"), np.array([seconds, rows]))
        os._exit(1)  # JAX may still wait for what rank 1 never sent
    raise AssertionError("the others have heard of nothing")


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in(phase, model):
    """Kills this process in its next step, if the step is not compiled."""
    layer = next(layer for layer in model.layers if isinstance(layer, sok.DistributedEmbedding))
    lookup, apply = layer.call, model.optimizer.apply

    def killed_beside_lookup(*args, **kwargs):
        if phase == "before the lookup":
            kill()
        rows = lookup(*args, **kwargs)
        if phase == "after the lookup":
            kill()
        # Tables have their gradients in turn: those of `other` may be there by now.
        rows["shop"].register_hook(kill)
        return rows

    def killed_beside_update(*args, **kwargs):
        if phase == "before the update":
            kill()
        apply(*args, **kwargs)
        kill()

    if phase in ("before the lookup", "after the lookup", "in the backward pass"):
        layer.call = killed_beside_lookup
    else:
        model.optimizer.apply = killed_beside_update


def fail(how, model, part):
    if how == "kill":
        kill()
    elif how in PHASES:
        kill_in(how, model)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("a program of a user has failed")
    elif how == "other":
        model.predict(part, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
