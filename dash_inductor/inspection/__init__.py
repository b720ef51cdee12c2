"""Code for a GPU that is not there: generated, compiled, read back and judged."""
