"""Code for a GPU that is not there: generated and compiled."""
