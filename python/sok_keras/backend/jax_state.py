"""JAX has no way of its own to save a model: there are Keras' alone."""


class TableState:
    """What a layer does for the framework's own way to save."""

    def _watch_state(self):
        pass
