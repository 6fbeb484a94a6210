"""What stands in for `tensorflow_variables` and `tensorflow_shards` on other backends."""

import keras


class TableVariable:
    """Refuses to be made."""

    def __init__(self, *arguments):
        del arguments
        raise NotImplementedError(
            f"`sok_keras.{type(self).__name__}` is a variable of TensorFlow. Received: KERAS_BACKEND={keras.backend.backend()!r}"
        )


ShardVariable = TableVariable


def dense(gradient):
    """Returns a gradient as it is."""
    return gradient
