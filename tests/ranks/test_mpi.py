"""Programs that `mpirun` starts as several ranks, over Open MPI and MPICH. Each has a small environment of its own: `make test-python`."""

import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest
from processes import HERE, PACKAGES, alone, environment
from test_ranks import compare, compare_ranks

import sok_keras as sok
from once import once_on

pytestmark = once_on("jax")

# Open MPI refuses to start as root, and to start more ranks than there are cores.
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

SEEDS = HERE.parents[2] / "shared" / "seeds"


@pytest.fixture(params=["openmpi", "mpich"])
def mpirun(request):
    """Runs a program as ranks. Returns its exit status and what it printed."""
    folder = pathlib.Path(sys.prefix) / request.param / "bin"
    if not (folder / "mpirun").exists():
        pytest.skip(f"{request.param} is not installed: `make test-python` does it")
    packages = os.pathsep.join([PACKAGES, sysconfig.get_path("purelib")])

    def start(ranks, program, *arguments, timeout=120, **variables):
        command = [folder / "mpirun", "-n", str(ranks), folder / "python", HERE / program, *arguments]
        variables = environment(**SETTINGS, **variables, PYTHONPATH=packages)
        done = subprocess.run(
            [*map(str, command)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout

    return start


def run(mpirun, *arguments, **variables):
    status, text = mpirun(*arguments, **variables)
    assert status == 0, text
    return text


def test_two_ranks_train_as_one(mpirun, tmp_path):
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        run(mpirun, ranks, "train.py", tmp_path / str(ranks))
    for case in ("adam", "clipped", "accumulated"):
        one = np.load(tmp_path / "1" / f"{case}0.npz")
        compare_ranks(one, [np.load(tmp_path / "2" / f"{case}{rank}.npz") for rank in range(2)])


def test_a_dump_of_two_ranks_is_loaded(mpirun, tmp_path):
    run(mpirun, 2, "persist.py", tmp_path, "dump", 1)
    sok.verify(tmp_path / "dump")
    alone("persist.py", tmp_path, "read", 0)
    dumped, loaded = np.load(tmp_path / "dump2.npz"), np.load(tmp_path / "read1.npz")
    compare(dumped, loaded, dumped.files)


@pytest.mark.parametrize("how", ["sizes", "threads", "other_ends_late", "finalized", "forked"])
def test_messages_cross(how, mpirun):
    text = run(mpirun, 2, "messages.py", how)
    assert text == ("late\n" if how == "other_ends_late" else "")


@pytest.mark.parametrize("how", ["other_raises", "other_stops", "other_is_killed"])
def test_nothing_hangs_if_a_rank_fails(how, mpirun):
    """`other_is_killed`: the launcher may end the other before it hears of it."""
    started = time.monotonic()
    status, text = mpirun(2, "messages.py", how, timeout=60)
    assert status != 0, text
    assert "heard" in text or how == "other_is_killed", text
    assert time.monotonic() - started < 40, text


def test_ranks_choose_what_carries_messages(mpirun):
    by_mpi, by_tcp = (sorted(f"rank {rank} by mpi: {is_mpi}" for rank in range(2)) for is_mpi in (True, False))
    assert sorted(run(mpirun, 2, "messages.py", "transport").splitlines()) == by_mpi
    assert sorted(run(mpirun, 2, "messages.py", "transport", SOK_EXCHANGE="tcp").splitlines()) == by_tcp
    assert sorted(run(mpirun, 2, "messages.py", "transport", "funneled").splitlines()) == by_tcp
    for exchange, arguments, told in (
        ("mpi", ["funneled"], "SOK_EXCHANGE=mpi: messages by MPI need the thread level MPI_THREAD_MULTIPLE"),
        ("ucx", [], 'SOK_EXCHANGE must be "tcp", "mpi" or "nccl". Received: SOK_EXCHANGE=\'ucx\''),
    ):
        status, text = mpirun(2, "messages.py", "transport", *arguments, timeout=60, SOK_EXCHANGE=exchange)
        assert status != 0 and text.count(f"ValueError: {told}") == 2, text


@pytest.mark.parametrize(
    ("exchange", "arguments", "told"),
    [
        ("ucx", {}, 'SOK_EXCHANGE must be "tcp", "mpi" or "nccl". Received: SOK_EXCHANGE=\'ucx\''),
        ("mpi", {}, "SOK_EXCHANGE=mpi needs `mpi4py`, which is not installed"),
        ("mpi", {"rank": 0, "world_size": 2, "address": "x:1"}, "SOK_EXCHANGE=mpi is for ranks that `mpi4py` finds"),
    ],
)
def test_a_choice_that_cannot_be_is_an_error(exchange, arguments, told, monkeypatch):
    monkeypatch.setenv("SOK_EXCHANGE", exchange)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    with pytest.raises(ValueError, match=re.escape(told)):
        sok.init(**arguments)


def test_programs_of_sparse_operation_kits_pages_run(mpirun, tmp_path):
    if not SEEDS.exists():
        pytest.skip(f"needs the documents of SparseOperationKit in {SEEDS}")
    run(mpirun, 2, "sok_pages.py", tmp_path, KERAS_BACKEND="tensorflow")
