"""The schedule that is chosen against the lower bound and against the schedules of the DASH paper, in the cost model."""
