"""What decides the bits of a training, written down, so that another process can be held to it."""

from .comparison import Difference, ManifestError
from .document import Manifest, ManifestFileError
from .live import Comparison, manifest

__all__ = ["Comparison", "Difference", "Manifest", "ManifestError", "ManifestFileError", "manifest"]
