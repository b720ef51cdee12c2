"""Sums over the ranks of a job, in an order that their number does not change."""
