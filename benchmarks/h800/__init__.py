"""The cost model held against the DASH paper's measurements of FlashAttention-3 on an H800.

It models the paper's machine (an H800) and kernel (the DASH authors'), not this project's kernel on any GPU.
"""
