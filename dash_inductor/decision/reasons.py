"""How reasons begin that are read elsewhere than where they are given."""

CAPTURED = "score_mod captures a tensor that requires a gradient"
CUDNN = "varlen_attn takes cuDNN"
NOT_COMPILED = "the graph did not compile with our kernels"
