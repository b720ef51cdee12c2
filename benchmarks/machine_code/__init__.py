"""Code for GPUs that need not be there: generated, compiled, read back from the machine code, judged and replayed."""
