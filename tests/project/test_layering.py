"""Imports go down only, a framework is touched in its own backend file, and the stub says what the compiled module has."""

import ast
import os
import pathlib
import platform
import subprocess
import sys

import keras
import numpy as np
import pytest

import sok_keras
import sok_keras.backend
from once import once_on
from reference import BACKEND

ROOT = pathlib.Path(sok_keras.__file__).parent
PACKAGE = "sok_keras"
FRAMEWORKS = {"tensorflow", "jax", "torch"}

STATES = {"backend.tensorflow_state", "backend.jax_state", "backend.torch_state"}

# From the top down. A module may import those of lower levels, and of its own level only where `SAME_LEVEL` says so.
LEVELS = [
    {"__init__"},
    {"keras_api"},
    {"callbacks"},
    {
        "callbacks.distributed",
        "callbacks.dump_checkpoint",
        "callbacks.early_stopping",
        "callbacks.table_statistics",
        "keras_extensions",
    },
    {"profile"},
    {"callbacks.best", "callbacks.frequency", "callbacks.progress", "prefetching", "shards"},
    {"exporters", "importers", "planner"},
    {"planner.sharding_planner"},
    {"planner.search", "planner.sharding_plan"},
    {"planner.enumerator"},
    {"planner.costs", "planner.measuring", "planner.units"},
    {"planner.topology", "planner.workload"},
    {"planner.hardware"},
    {
        "importers.columns",
        "importers.dynamicemb_dumps",
        "importers.frameworks",
        "importers.sok_dumps",
        "importers.tfra_files",
    },
    {"importers.pieces"},
    {"checkpoint"},
    {"copies", "dump_handle"},
    {"optimizer", "arrays", "horovod"},
    {"general"},
    {"fixed_variables"},
    {"variables"},
    {"static_variables", "saved_rows", "variable_tables"},
    {"variable_options"},
    {"layers.distributed_embedding"},
    {"layers.dynamic_embedding"},
    {"layers.base", "preprocessing"},
    {"core", "ids"},
    {"plan", "trigger"},
    {"export_guard"},
    {"rows_file", "table", "feature_config", "core_initializers", "ragged"},
    {"table_config", "sharded_table"},
    {"table_optimizers"},
    {"policies", "optimizers", "initializers"},
    {"distributed"},
    {"startup"},
    {"backend"},
    {"backend.tensorflow_shards", "backend.table_variables"},
    {"backend.tensorflow_variables"},
    {"backend.tensorflow", "backend.jax", "backend.torch"},
    {"backend.exchange"},
    STATES,
    {"backend.jax_trainer", "backend.torch_sums"},
    {"backend.private_keras", "backend.private_tensorflow", "backend.private_jax", "backend.private_torch"},
    {"backend.tensorflow_data", "backend.torch_data"},
    {
        "backend.handles",
        "backend.insertion",
        "backend.leaving",
        "errors",
        "flags",
        "keys",
        "launch",
        "manifest",
        "mpi",
        "shares",
        "sok_format",
        "strings",
        "whole_package",
    },
    {"pending_dumps"},
    {"_native"},
]

# Imports of a framework in functions, where its own kinds of tensors or strategies are at hand: module -> framework -> functions.
IN_FUNCTIONS = {
    "layers.base": {"tensorflow": {"check_one_device"}},
    "importers.frameworks": {"torch": {"_weights"}},
    "strings": {"tensorflow": {"_keys_of_tensor"}},
    "ragged": {
        "tensorflow": {"in_order", "bags_of", "dense_mask", "flat_numbers", "rows_like"},
        "torch": {"_rows_of_bags", "from_nested"},
    },
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def level_of(module):
    return next(number for number, modules in enumerate(LEVELS) if module in modules)


def imported(node):
    """Full names that an import statement may bring in: of `from a import b` both `a` and `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def own_imports(module):
    """Modules of the package that a module imports, anywhere in it."""
    names = [name for node in ast.walk(MODULES[module]) for name in imported(node)]
    own = {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
    return own & {*MODULES, "_native"}


def framework_imports(module):
    """`(framework, function it stands in or None)` of each import of one."""
    found = set()

    def visit(node, function):
        roots = {name.split(".")[0] for name in imported(node)}
        found.update((root, function) for root in roots & FRAMEWORKS)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(MODULES[module], None)
    return found


def test_every_module_has_a_level():
    modules = {module for module in MODULES if module != "layers"}  # the package of layers is empty
    assert modules == set().union(*LEVELS) - {"_native"}
    assert not MODULES["layers"].body


@pytest.mark.parametrize("module", [m for m in MODULES if m != "layers"])
def test_imports_go_down_only(module):
    upward = {name for name in own_imports(module) if level_of(name) <= level_of(module)}
    assert not upward


def test_native_module_is_imported_in_backend_alone():
    importers = {module for module in MODULES if "_native" in own_imports(module)}
    without = {"backend.handles", "backend.insertion", "backend.leaving", *STATES}
    without |= {
        "backend.tensorflow",
        "backend.table_variables",
        "backend.tensorflow_data",
        "backend.tensorflow_shards",
        "backend.tensorflow_variables",
        "backend.torch_data",
        *(module for module in MODULES if module.startswith("backend.private_")),
    }
    of_backend = {m for m in MODULES if m.startswith("backend") and m not in without}
    assert importers == of_backend | {
        "distributed",
        "dump_handle",
        "errors",
        "manifest",
        "planner.costs",
        "planner.measuring",
        "policies",
        "strings",
    }
    # TensorFlow loads the library itself, to see the ops in it.
    assert "load_op_library" in ast.unparse(MODULES["backend.tensorflow"])


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("backend.")])
def test_frameworks_are_imported_in_backend_alone(module):
    stated = {
        (framework, function) for framework, functions in IN_FUNCTIONS.get(module, {}).items() for function in functions
    }
    assert framework_imports(module) == stated


PRIVATE = ("keras.src", "tensorflow.python", "__internal__", "jax._src", "torch._C")
PRIVATE_ATTRIBUTES = {
    *("_flatten_layers", "_value", "_iterations", "_accumulated_gradients", "_get_variable_index", "_clip_gradients"),
    *("_use_weight_decay", "_state_dict_hooks", "_restore_from_tensors", "_initial_epoch"),
}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("backend.private_")])
def test_private_names_of_keras_and_frameworks_are_used_in_their_own_files(module):
    tree = MODULES[module]
    imports = [name for node in ast.walk(tree) for name in imported(node)]
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    # An optimizer of ours has what its base class gives it.
    attributes = {node.attr for node in found if ast.unparse(node.value) != "self"}
    used = [ast.unparse(node) for node in found]
    assert not [name for name in [*imports, *used] if name.startswith(PRIVATE) or ".__internal__" in name]
    assert not attributes & PRIVATE_ATTRIBUTES


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_backend_file_imports_its_own_framework_alone(framework):
    assert {found for found, _ in framework_imports(f"backend.{framework}")} == {framework}


# ---- the stub of the compiled module


def described(body, outer=""):
    """Names in a stub, `Class.method` too. Those of exceptions' numbers are left out: they belong to an instance."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(outer + node.name)
        if isinstance(node, ast.AnnAssign) and not outer.startswith("TableFullError"):
            names.add(outer + node.target.id)
        if isinstance(node, ast.ClassDef):
            names |= described(node.body, f"{node.name}.")
    return names


def defined(module):
    """Names in the compiled module, `Class.method` too, without what each Python object has."""
    names = {name for name in dir(module) if not name.startswith("_")}
    for owner in [name for name in names if isinstance(getattr(module, name), type)]:
        own = vars(getattr(module, owner))
        is_new = "__new__" in own  # what a class makes itself in Rust is an `__init__` in a stub
        methods = {name for name in own if not name.startswith("__") or name == "__len__"}
        names |= {f"{owner}.{name}" for name in methods | ({"__init__"} if is_new else set())}
    return names


def test_stub_has_the_names_of_the_compiled_module():
    stub = ast.parse((ROOT / "_native.pyi").read_text())
    assert described(stub.body) == defined(sok_keras.backend.native)


FRAMEWORKS_IN_A_FRESH_PROCESS = f"""
import sys
loaded = lambda: print(*sorted({FRAMEWORKS!r} & sys.modules.keys()))
import keras
loaded()
import sok_keras
loaded()
"""


def test_importing_the_package_imports_no_framework_but_the_chosen_one():
    """Keras itself may bring others; what we add to them is nothing."""
    command = [sys.executable, "-c", FRAMEWORKS_IN_A_FRESH_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    of_keras, with_ours = (set(line.split()) for line in done.stdout.splitlines())
    assert with_ours == of_keras | {BACKEND}


def in_a_fresh_process(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_dumps_are_read_without_keras_or_a_framework(tmp_path):
    layer = sok_keras.DynamicEmbedding(2, name="ids")
    layer(np.arange(5, dtype="int32"), training=True)
    sok_keras.dump(tmp_path / "d", layer)
    code = f"""
import sys, sok_keras
sok_keras.verify({str(tmp_path / "d")!r})
print(sok_keras.read_manifest({str(tmp_path / "d")!r}).tables[0].num_rows, sok_keras.__version__)
try:
    sok_keras.verify({str(tmp_path)!r})
except (FileNotFoundError, sok_keras.CorruptDumpError) as error:
    print(type(error).__name__)
print(*({FRAMEWORKS | {"keras"}!r} & sys.modules.keys()))
layer = sok_keras.DynamicEmbedding(2)
import numpy as np
print(len(layer(np.array([7, 8], "int32"), training=True)), layer.get_table().stats().size)
"""
    rows, error, loaded, looked_up = in_a_fresh_process(code)
    assert (rows, error, loaded, looked_up) == (f"5 {sok_keras.__version__}", "FileNotFoundError", "", "2 2")


@once_on("jax")
@pytest.mark.parametrize(
    "imports",
    [
        "import keras, sok_keras",
        "import sok_keras, keras",
        "import sok_keras; import keras.layers",
        "from sok_keras.callbacks import DumpCheckpoint",
        "from sok_keras.backend import native",
        "import sok_keras.layers.base",
    ],
)
def test_saved_models_find_the_layers_whichever_is_imported_first(imports, tmp_path):
    model = keras.Sequential([keras.Input((1,), dtype="int32"), sok_keras.DynamicEmbedding(2)])
    model.save(tmp_path / "m.keras")
    code = f"{imports}\nimport keras\nprint(len(keras.models.load_model({str(tmp_path / 'm.keras')!r}).layers))"
    assert in_a_fresh_process(code) == ["1"]


def test_ranks_are_started_without_keras_or_a_framework():
    code = f"import sys, sok_keras.launch\nprint(*({FRAMEWORKS | {'keras'}!r} & sys.modules.keys()))"
    assert in_a_fresh_process(code) == [""]


def test_a_module_is_the_same_whichever_way_it_is_imported():
    code = """
import sok_keras.table_config
import sok_keras, sys
config = sok_keras.TableConfig("t", None, 2)
print(type(config) is sok_keras.table_config.TableConfig is sys.modules["sok_keras.table_config"].TableConfig)
"""
    assert in_a_fresh_process(code) == ["True"]


def test_names_that_are_not_there_are_no_attributes():
    with pytest.raises(AttributeError, match="'sok_keras' has no attribute 'Embedding'"):
        sok_keras.Embedding  # noqa: B018
    assert set(sok_keras.__all__) <= set(dir(sok_keras))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
@pytest.mark.parametrize(
    ("setting", "does", "kept"),
    [
        ({}, "sok_keras.DynamicEmbedding(2)", BACKEND != "torch"),
        pytest.param({}, "", False, marks=once_on("jax")),
        pytest.param({"SOK_KEEP_FREED_MEMORY": "0"}, "sok_keras.DynamicEmbedding(2)", False, marks=once_on("jax")),
        pytest.param({"MALLOC_TOP_PAD_": "0"}, "sok_keras.DynamicEmbedding(2)", False, marks=once_on("jax")),
    ],
)
def test_memory_of_a_step_is_kept_for_the_next_unless_somebody_said_otherwise(setting, does, kept):
    """Freed arrays of 40 MiB are used again without page faults, or mapped anew. To import the package alone changes nothing."""
    code = f"""
import resource, sok_keras
{does}
from ctypes import CDLL, c_size_t, c_void_p, memset
libc = CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [c_size_t], c_void_p, [c_void_p]
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [libc.malloc(40 << 20) for _ in range(4)]
    for array in arrays:
        memset(array, 1, 40 << 20)
    for array in arrays:
        libc.free(array)
print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "SOK_"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment | setting, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout.split("faults")[1]) < 1000) == kept
