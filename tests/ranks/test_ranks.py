"""Programs that run as several ranks, beside the same program in one process."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import sok_keras as sok

HERE = pathlib.Path(__file__).parent
PACKAGES = os.pathsep.join([str(pathlib.Path(sok.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "RANK", "WORLD_SIZE")}
    common = {"PYTHONPATH": PACKAGES, "KERAS_BACKEND": keras.backend.backend(), "JAX_ENABLE_X64": "1"}
    return {**kept, **common, "SOK_NUM_THREADS": "1", **variables}


def launch(ranks, program, *arguments, timeout=240):
    """Runs a program as ranks. Returns its exit status and what it printed."""
    command = [sys.executable, "-m", "sok_keras.launch", "-n", str(ranks), str(HERE / program), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return done.returncode, done.stdout


def run(ranks, program, *arguments):
    status, text = launch(ranks, program, *arguments)
    assert status == 0, text


def alone(program, *arguments):
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout


def compare(one, many, names):
    for name in names:
        np.testing.assert_allclose(many[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_two_ranks_train_as_one_process(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    alone("train.py", folders[0])
    run(2, "train.py", folders[1])
    for case in ("adam", "clipped", "accumulated"):
        one = np.load(folders[0] / f"{case}0.npz")
        compare_ranks(one, [np.load(folders[1] / f"{case}{rank}.npz") for rank in range(2)])


def compare_ranks(one, ranks):
    np.testing.assert_allclose(np.mean([rank["losses"] for rank in ranks], axis=0), one["losses"], rtol=1e-4)
    dense = [name for name in one.files if name.startswith("dense")]
    assert len(dense) == 4
    for name in dense:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])
    compare(one, ranks[0], [name for name in one.files if name != "losses"])
    for name in one.files:
        if name.startswith(("keys", "rows")):
            np.testing.assert_array_equal(ranks[0][name], ranks[1][name])


def test_tables_answer_for_all_ranks(tmp_path):
    run(3, "persist.py", tmp_path, "tables", 0)


def test_a_dump_of_three_ranks_goes_on_in_one_and_in_two(tmp_path):
    run(3, "persist.py", tmp_path, "dump", 1)
    sok.verify(tmp_path / "dump")
    for ranks in (1, 2):
        run(ranks, "persist.py", tmp_path, "load", 2)
    one, two = (np.load(tmp_path / f"load{ranks}.npz") for ranks in (1, 2))
    compare(one, two, one.files)


@pytest.mark.parametrize("how", ["kill", "stop", "raise", "other"])
def test_a_rank_hears_of_another_that_fails(how, tmp_path):
    """`stop`: the launcher must end a rank that does nothing any more."""
    if how != "kill" and keras.backend.backend() != "torch":
        pytest.skip("heard of by the core, in the same way on each backend")
    status, text = launch(2, "fail.py", tmp_path, how, timeout=120)
    assert status != 0, text
    assert (tmp_path / "heard.npy").exists(), text


# ---- start-up


def start(rank, code, **variables):
    command = [sys.executable, "-c", f"import sok_keras as sok\n{code}"]
    return subprocess.Popen(
        command, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def last_line(process):
    text = process.communicate(timeout=120)[0]
    return text.strip().splitlines()[-1] if text.strip() else ""


def test_arguments_connect_ranks():
    address = f"127.0.0.1:{free_port()}"
    code = (
        "sok.init(rank={0}, world_size=2, address='{1}', timeout=60)\n"
        "print(sok.rank(), sok.size(), sok.local_rank(), sok.all_reduce([1.5, {0}]).tolist(), sok.all_reduce({0}, 'max'), "
        "sok.broadcast([{0}], 1))"
    )
    ranks = [start(rank, code.format(rank, address)) for rank in range(2)]
    assert [last_line(rank) for rank in ranks] == ["0 2 0 [3.0, 1.0] 1 [1]", "1 2 1 [3.0, 1.0] 1 [1]"]


def test_a_wrong_start_is_an_error_that_says_what_is_wrong():
    def told(code, **variables):
        return last_line(start(0, code, **variables))

    assert told("sok.init(rank=0)").startswith(
        "ValueError: `rank`, `world_size` and `address` must be given together. Missing: "
    )
    assert told("sok.init(rank=2, world_size=2, address='127.0.0.1:1')").endswith("Received: 2 and 2")
    assert told("sok.init()", RANK="0").endswith("Missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
    assert "RANK must be an integer" in told("sok.init()", RANK="x", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    started = time.monotonic()
    alone = f"sok.init(rank=0, world_size=2, address='127.0.0.1:{free_port()}', timeout=1)"
    assert told(alone).startswith("sok_keras.SokError: ")
    assert time.monotonic() - started < 60
    twice = "sok.init(merge_blocks=4)\nsok.init(merge_blocks=4)"
    assert told(twice) == "sok_keras.SokError: `sok_keras.init` was called before"
    assert (
        told("sok.init(); print(sok.world_size())", RANK="0", WORLD_SIZE="1", MASTER_ADDR="a", MASTER_PORT="1") == "1"
    )


def test_without_ranks_nothing_is_asked_of_others():
    assert (sok.rank(), sok.world_size(), sok.size(), sok.local_rank()) == (0, 1, 1, 0)
    sok.barrier()
    assert sok.all_reduce(3) == 3 and sok.broadcast(4) == 4
    with pytest.raises(ValueError, match="`op` must be"):
        sok.all_reduce(1, op="product")
    with pytest.raises(ValueError, match="`root` must be a rank"):
        sok.broadcast(1, root=1)


def test_the_launcher_ends_with_the_status_of_a_rank_that_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nsys.exit(int(sys.argv[1]) if os.environ['RANK'] == '1' else 0)\n")
    assert launch(2, program, 7)[0] == 7
    assert launch(2, program, 0)[0] == 0
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch(1, program)[0] == 128 + signal.SIGKILL


@pytest.mark.parametrize("placement", ["everywhere", "localized:x", "localized:", "localized:-1", 3])
def test_placements_are_checked(placement):
    with pytest.raises(ValueError, match="`placement` must be one of"):
        sok.TableConfig("t", 10, 2, placement=placement)


def test_only_static_tables_are_replicated():
    with pytest.raises(ValueError, match="only for a static table"):
        sok.TableConfig("t", None, 2, placement="replicated")
    sok.TableConfig("t", 10, 2, placement="replicated")


def test_reductions_are_checked():
    with pytest.raises(ValueError, match="`gradient_reduction` must be"):
        sok.OptimizerWrapper("adam", gradient_reduction="max")
    wrapper = sok.OptimizerWrapper("adam", gradient_reduction="sum")
    assert sok.OptimizerWrapper.from_config(wrapper.get_config()).gradient_reduction == "sum"


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="only XLA reorders calls")
def test_a_lookup_depends_on_the_one_before():
    code = """
import jax, numpy as np
sok.init(merge_blocks=1)
layers = [sok.DynamicEmbedding(2) for _ in range(4)]
loss = lambda scale, ids: sum(layer(ids).sum() * scale for layer in layers)
ids = np.arange(3)
[layer(ids) for layer in layers]
graphs = [str(jax.make_jaxpr(function)(1.0, ids)) for function in (loss, jax.grad(loss))]
print([graph.count("('follows', True)") for graph in graphs], float(jax.jit(loss)(1.0, ids)) == float(loss(1.0, ids)))
"""
    assert last_line(start(0, code)) == "[3, 3] True"


def test_fit_and_evaluate_tell_the_metrics_of_all_ranks(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for ranks, folder in zip((1, 2), folders, strict=True):
        folder.mkdir()
        status, text = launch(ranks, "fit.py", folder)
        assert status == 0, text
        assert text.count("Epoch 1/20") == 1, "rank 0 alone prints"
    one, *two = (
        json.loads((folder / f"told{rank}.json").read_text())
        for folder, rank in ((folders[0], 0), (folders[1], 0), (folders[1], 1))
    )
    assert two[0] == two[1]
    assert two[0].keys() == one.keys() and {"auc", "val_auc", "loss", "evaluated"} <= one.keys()
    for name, values in one.items():
        pairs = (
            [(name, values, two[0][name])]
            if name != "evaluated"
            else [(f"val_{key}", value, two[0][name][key]) for key, value in values.items()]
        )
        for metric, expected, told in pairs:
            # The mean of 91 losses counts the sample that fills the last batch.
            scale = 91 / 92 if metric == "val_loss" else 1
            np.testing.assert_allclose(told, np.multiply(expected, scale), rtol=1e-4, err_msg=metric)


def test_all_ranks_skip_a_step_in_which_one_has_an_overflow(tmp_path):
    run(2, "overflow.py", tmp_path)


def test_ids_are_told_to_a_layer_outside_of_graphs():
    layer = sok.DynamicEmbedding(2)
    sok.prefetch(layer, np.array([1, 2], "int32"))
    assert len(layer.get_table()) == 0
    with pytest.raises(ValueError, match="must be a DynamicEmbedding or a DistributedEmbedding"):
        sok.prefetch(keras.layers.Dense(1), np.array([1], "int32"))
    with pytest.raises(ValueError, match="outside of functions that are traced"):
        sok.prefetch(layer, keras.Input((2,), dtype="int32"))
