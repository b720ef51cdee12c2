"""What decides the bits of a training, written down, so that another process can be held to it."""

from ..import_hook import require_triton

require_triton()  # whose absence is told in a sentence here, and not by what imports it

from .comparison import Difference, ManifestError  # noqa: E402
from .document import Manifest, ManifestFileError  # noqa: E402
from .live import Comparison, manifest  # noqa: E402

__all__ = ["Comparison", "Difference", "Manifest", "ManifestError", "ManifestFileError", "manifest"]
