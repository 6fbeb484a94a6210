"""Two ranks of which one fails before a step: by a signal, by an exception, or by a call that the other does not make."""

import os
import signal
import sys
import time

import numpy as np
from seeds import draw_seeds_from
from train import OPTIMIZERS, batches, make_model, share

import sok_keras as sok

TIMEOUT = 10


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
            np.save(os.path.join(folder, "heard.npy"), np.array([seconds, rows]))
        os._exit(1)  # JAX may still wait for what rank 1 never sent
    raise AssertionError("rank 0 has heard of nothing")


def fail(how, model, part):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "raise":
        raise ValueError("a program of a user has failed")
    elif how == "other":
        model.predict(part, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
