"""Keras 3 on TensorFlow, JAX or torch: gradients or local steps are averaged, compressed, in Keras' own ``fit``."""

try:
    import keras  # noqa: F401
except ImportError as error:
    raise ImportError(f"{error}; Keras comes with pip install 'gradwire[keras]', and its backend by itself") from error

from gradwire.keras.callbacks import AverageMetrics
from gradwire.keras.gradients import Handle, compress
from gradwire.keras.local_steps import Periodic, periodic

__all__ = ["AverageMetrics", "Handle", "Periodic", "compress", "periodic"]
