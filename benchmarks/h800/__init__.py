"""The cost model held against the DASH paper's measurements of FlashAttention-3 on an H800."""
