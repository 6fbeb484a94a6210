"""Variables of TensorFlow, on the other backends."""

import pytest

import sok_keras as sok
from reference import BACKEND


@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow has them")
def test_variables_of_tensorflow_are_refused():
    with pytest.raises(NotImplementedError, match="`sok_keras.DynamicVariable` is a variable of TensorFlow. Received"):
        sok.DynamicVariable(dimension=3)
    with pytest.raises(NotImplementedError, match="`sok_keras.Variable` is a variable of TensorFlow. Received"):
        sok.Variable([[1.0]])
