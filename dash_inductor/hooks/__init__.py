"""Torch, Triton and Python as the package changes them: how the pass gets into Inductor, and out again."""

import torch  # noqa: F401  # first: it imports `autoload`, which would find a module here that is not yet whole
