"""Seeds of a program."""

import random


def draw_seeds_from(seed):
    """Makes Keras draw the same seeds each time. `keras.utils.set_random_seed` would import TensorFlow first, in seconds."""
    random.seed(seed)
