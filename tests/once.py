"""Marks tests that take long and are about what no backend changes: one backend runs them."""

import os

import keras
import pytest


def once_on(backend):
    """Skips a test on other backends. With `SOK_EVERY_BACKEND=1` in the environment each one runs it."""
    is_skipped = keras.backend.backend() != backend and not os.environ.get("SOK_EVERY_BACKEND")
    return pytest.mark.skipif(is_skipped, reason=f"the same on each backend: {backend} runs it")
