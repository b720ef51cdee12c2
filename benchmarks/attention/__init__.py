"""Times attention backwards on a GPU: ours, by schedule and without its order, against those of PyTorch and FlashAttention."""
