"""JAX has no file format of its own for models, so there is nothing to add to Keras' formats."""


class TableState:
    """Base of the layers that saves rows in the framework's own files."""

    def _watch_state(self):
        pass
