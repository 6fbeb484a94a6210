"""What stands in for `tensorflow_variables` on other backends."""

import keras


class TableVariable:
    """Refuses to be made."""

    def __init__(self, *arguments):
        del arguments
        raise NotImplementedError(
            f"`sok_keras.DynamicVariable` is a variable of TensorFlow. Received: KERAS_BACKEND={keras.backend.backend()!r}"
        )
