"""The first use of a kernel on a GPU: it runs on a small attention before a real one is given to it.

A kernel that does not work there shows in wrong gradients, in bits that differ from launch to launch, or in a fault. A fault takes
the GPU from its process for good. So another process tries the kernel (`reproduce/trial.py`), once for each kind on a machine. A
file keeps what came out, for this package, driver, torch, Triton and GPU model.
"""
