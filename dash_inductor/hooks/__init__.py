"""Torch, Triton and Python as the package changes them: how the pass gets into Inductor, and out again."""
