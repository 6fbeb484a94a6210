"""Imports the package as a whole, as soon as Keras or a module that needs Keras is imported.

Saved models then find the layers' classes, whatever a program has imported first.
"""

import importlib
import importlib.util
import sys

WHOLE = "sok_keras.keras_api"
WITHOUT_KERAS = {
    "sok_keras._native",
    "sok_keras.errors",
    "sok_keras.launch",
    "sok_keras.manifest",
    "sok_keras.mpi",
    "sok_keras.pending_dumps",
    "sok_keras.strings",
    "sok_keras.whole_package",
    WHOLE,
}


class WholePackage:
    """A finder of `sys.meta_path`, which leaves the finding to the others."""

    def find_spec(self, name, path=None, target=None):
        if WHOLE in sys.modules:
            return None
        if name == "keras":
            return _and_then_the_package(_found_by_others(self, name))
        if name.startswith("sok_keras.") and name not in WITHOUT_KERAS:
            importlib.import_module(WHOLE)
            if name in sys.modules:
                spec = sys.modules[name].__spec__
                spec.loader = _Loaded(spec.loader)
                return spec
        return None


class _Loaded:
    """Gives the importer a module that is loaded already, once."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        module.__spec__.loader = self._loader


def _found_by_others(finder, name):
    sys.meta_path.remove(finder)
    try:
        return importlib.util.find_spec(name)
    finally:
        sys.meta_path.insert(0, finder)


def _and_then_the_package(spec):
    if spec is not None and spec.loader is not None:
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            importlib.import_module(WHOLE)

        spec.loader.exec_module = exec_module
    return spec
