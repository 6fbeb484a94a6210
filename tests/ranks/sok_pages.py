"""A rank that runs the programs of SparseOperationKit's pages as they are printed, but for their imports."""

import datetime
import os
import pathlib
import re
import sys
import types

import numpy as np
import tensorflow as tf

import sok_keras as sok
from sok_keras import distributed, horovod


def stand_in():
    """Lets the imports of the pages find this package."""
    for name in ("sparse_operation_kit", "sparse_operation_kit.experiment"):
        sys.modules[name] = sok
    sok.experiment = sok
    sys.modules["horovod"] = types.ModuleType("horovod")
    sys.modules["horovod.tensorflow"] = sys.modules["horovod"].tensorflow = horovod
    sys.modules["pytz"] = types.SimpleNamespace(utc=datetime.timezone.utc)


def closed(block):
    """A block with the brackets that the copy of the page has lost at the ends of statements."""
    lines, text = [], ""
    for line in [*block.splitlines(), ""]:
        text = "\n".join(lines)
        if not line.strip():
            lines.append(")" * (text.count("(") - text.count(")")))
        lines.append(line)
    return "\n".join(lines)


def started():
    rank, size = sok.rank(), sok.size()
    assert (horovod.rank(), horovod.size(), horovod.is_initialized()) == (rank, size, True)
    mean = horovod.allreduce(tf.fill((2, 2), float(rank)))
    assert (mean.numpy() == (size - 1) / 2).all()
    graph = tf.function(lambda: horovod.allreduce(tf.fill((2,), 1 + tf.cast(rank, tf.float32)), op=horovod.Sum))
    assert (graph().numpy() == size * (size + 1) / 2).all()
    assert horovod.allgather(tf.fill((rank + 1,), rank)).shape == size * (size + 1) // 2
    assert horovod.broadcast(tf.constant([rank]), size - 1).numpy() == [size - 1]
    weight = tf.Variable([1.0 + rank])
    horovod.broadcast_variables([weight], root_rank=0)
    with horovod.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = weight * (rank + 1.0) + tf.reduce_sum(tf.gather(weight, [0]))
    assert weight.numpy() == 1 and tape.gradient(loss, [weight])[0].numpy() == (size + 1) / 2 + 1


def main(folder):
    stand_in()
    os.makedirs(os.path.join(folder, "run"), exist_ok=True)
    os.chdir(os.path.join(folder, "run"))
    seeds = os.path.join(os.path.dirname(__file__), *[os.pardir] * 3, "shared", "seeds")
    pages = {number: next(name for name in os.listdir(seeds) if name.startswith(number)) for number in ("000", "002")}
    texts = {number: pathlib.Path(seeds, name).read_text() for number, name in pages.items()}

    program = "\n".join(re.findall(r"```python\n(.*?)```", texts["000"], re.DOTALL))
    names = {}
    exec(program, names)
    rank, size, v1, v2 = sok.rank(), sok.size(), names["v1"], names["v2"]
    started()
    assert [len(keys) for keys in names["keys"]] == [24, 3] and names["values"][1].shape == (3, 16)
    for variable, keys in ((v1, range(24)), (v2, [1, 2, 3])):
        own = distributed.gather_arrays(sok.export(variable)[0].numpy())
        assert len(own) == size and sorted(np.concatenate(own)) == list(keys)
    if size == 1:
        np.testing.assert_allclose(sok.export(v1)[1], names["values"][0], rtol=1e-6)

    ran = []
    for block in texts["002"].split("\nimport numpy as np\n")[1:]:
        # What follows a program begins with a capital letter, or is a name of the next section.
        code = re.split(r"^(?=[A-Z]|class |sparse_operation_kit\.)", block, maxsplit=1, flags=re.MULTILINE)[0]
        names = {"np": np}
        exec(closed(code), names)
        ran.append(names)
    assert len(ran) == 5
    np.testing.assert_array_equal(ran[0]["v"], np.arange(12).reshape(4, 3)[rank::size])
    assert ran[1]["v"].shape == (5 if rank == 0 else 0, 3)
    expected = [[[6, 8, 10], [36, 39, 42]], [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]]]
    assert [one.numpy().tolist() for one in ran[2]["embeddings"]] == expected
    assert ran[3]["embedding"].numpy().tolist() == [[13.0] * 3] * 3
    assert ran[4]["embedding"].numpy().tolist() == [[12.0] * 3] * 3


main(sys.argv[1])
