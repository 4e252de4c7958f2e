"""The DALI backend: decode and augment on the GPU, with torchvision's pixels.

Importing this package imports neither nvidia.dali nor torchvision; making a backend imports the former.
"""

from gpupipe.backends.dali.backend import DaliBackend

__all__ = ["DaliBackend"]
