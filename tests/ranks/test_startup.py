"""How ranks find each other, under each launcher."""

import signal
import subprocess
import sys
import time

import keras
import pytest
from processes import environment, free_port, last_line, launch, start

import sok_keras as sok
from once import once_on
from sok_keras import startup

BACKEND = keras.backend.backend()


def test_arguments_connect_ranks():
    address = f"127.0.0.1:{free_port()}"
    code = (
        "sok.init(rank={0}, world_size=2, address='{1}', timeout=60)\n"
        "print(sok.rank(), sok.size(), sok.local_rank(), sok.all_reduce([1.5, {0}]).tolist(), sok.all_reduce({0}, 'max'), "
        "sok.broadcast([{0}], 1))"
    )
    ranks = [start(rank, code.format(rank, address)) for rank in range(2)]
    assert [last_line(rank) for rank in ranks] == ["0 2 0 [3.0, 1.0] 1 [1]", "1 2 1 [3.0, 1.0] 1 [1]"]


@once_on("jax")
@pytest.mark.parametrize("options", [("", "exchange_dtype='bfloat16'"), ("merge_blocks=4", "merge_blocks=6")])
def test_ranks_with_other_arguments_are_told_so(options):
    address = f"127.0.0.1:{free_port()}"
    code = "sok.init(rank={}, world_size=2, address='{}', timeout=60, {})"
    ranks = [start(rank, code.format(rank, address, option)) for rank, option in enumerate(options)]
    for rank, line in enumerate(map(last_line, ranks)):
        assert line.startswith("ValueError: all ranks must give the same `merge_blocks` and `exchange_dtype`"), line
        assert f"on rank {rank}, merge_blocks=" in line, line


@once_on("jax")
def test_a_wrong_start_is_an_error_that_says_what_is_wrong():
    def told(code, **variables):
        return last_line(start(0, code, **variables))

    assert told("sok.init(rank=0)").startswith(
        "ValueError: `rank`, `world_size` and `address` must be given together. Missing: "
    )
    assert told("sok.init(rank=2, world_size=2, address='127.0.0.1:1')").endswith("Received: 2 and 2")
    assert told("sok.init()", RANK="0").endswith("Missing: WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
    assert "RANK must be an integer" in told("sok.init()", RANK="x", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1")
    assert told("sok.init(exchange_dtype='float16')").startswith("ValueError: `exchange_dtype` must be")
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


@once_on("jax")
def test_the_launcher_ends_with_the_status_of_a_rank_that_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nsys.exit(int(sys.argv[1]) if os.environ['RANK'] == '1' else 0)\n")
    assert launch(2, program, 7)[0] == 7
    assert launch(2, program, 0)[0] == 0
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert launch(1, program)[0] == 128 + signal.SIGKILL


# ---- launchers and frameworks

# In one write: launchers mix lines of ranks that are written in parts.
TOLD = (
    "import os\n"
    "os.write(1, f'{sok.rank()} {sok.world_size()} {sok.local_rank()} {sok.all_reduce(sok.rank())}\\n'.encode())"
)


@once_on("jax")
def test_variables_of_slurm_connect_ranks():
    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(free_port())}
    ranks = [start(rank, f"sok.init(timeout=60)\n{TOLD}", SLURM_PROCID=str(rank), **common) for rank in range(2)]
    assert [last_line(rank) for rank in ranks] == ["0 2 0 1", "1 2 1 1"]


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("gpu03", "gpu03"),
        ("a-1,b-2", "a-1"),
        ("gpu[03-05,9],other", "gpu03"),
        ("n[7],m", "n7"),
        ("rack[2,4]n[3-5]", "rack2n3"),
    ],
)
def test_the_first_node_of_slurm_is_that_of_rank_0(nodes, first):
    assert startup._first_node(nodes) == first


@pytest.mark.skipif(BACKEND != "torch", reason="torchrun is PyTorch's launcher")
@pytest.mark.parametrize("group", [True, False])
def test_torchrun_starts_ranks(group, tmp_path):
    """With a group of PyTorch's that the program has made, or by the variables alone."""
    made = "torch.distributed.init_process_group('gloo')" if group else ""
    program = tmp_path / "program.py"
    program.write_text(f"import torch, sok_keras as sok\n{made}\nsok.init(timeout=60)\n{TOLD}\n")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run([*command, str(program)], env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 2 0 1", "1 2 1 1"]


@pytest.mark.skipif(BACKEND != "jax", reason="jax.distributed is JAX's group of processes")
@pytest.mark.parametrize("by_keras", [True, False])
def test_a_group_of_jax_connects_ranks(by_keras):
    """JAX does not compute for it, since that would take a GPU before `init` says which."""
    address = f"127.0.0.1:{free_port()}"

    def code(rank):
        group = "keras.distribution" if by_keras else "jax.distributed"
        return f"""
import jax, keras
from sok_keras.backend.private_jax import backends_are_initialized
{group}.initialize('{address}', 2, {rank})
before = backends_are_initialized()
sok.init(timeout=60)
assert backends_are_initialized() == before
{TOLD}"""

    ranks = [start(rank, code(rank)) for rank in range(2)]
    assert [last_line(rank) for rank in ranks] == ["0 2 0 1", "1 2 1 1"]


# ---- addresses


def host_of(address):
    return address.rpartition(":")[0]


def test_a_host_that_knows_itself_as_loopback_gives_another_address(monkeypatch):
    monkeypatch.setattr(startup.socket, "gethostname", lambda: "127.0.1.1")
    assert host_of(startup.own_address()) == startup._address_to_others()
    monkeypatch.setattr(startup, "_address_to_others", lambda: "127.0.0.1")
    assert host_of(startup.own_address()) == "127.0.0.1", "a host without a network"


def test_names_by_which_others_have_reached_this_host_come_first():
    assert host_of(startup.own_address("localhost")) == "127.0.0.1"
    elsewhere, unknown = "192.0.2.1", "no-such-host.invalid"
    assert host_of(startup.own_address(None, elsewhere, unknown)) == host_of(startup.own_address())
