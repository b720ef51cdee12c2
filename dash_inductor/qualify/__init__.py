"""The first minutes on a GPU: kernels right there, backwards measured side by side, predictions held against them.

The command `qualify` starts each stage (`stages.py`) as a process of its own (`child.py`), since a kernel that faults takes the GPU
from its process. What a stage finds stands in a folder as it comes.
"""
