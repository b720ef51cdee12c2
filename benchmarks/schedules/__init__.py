"""Schedules in the cost model: replayed, drawn, and held against the lower bound and the schedules of the DASH paper."""
