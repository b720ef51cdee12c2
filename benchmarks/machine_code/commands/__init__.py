"""One module per command of `python -m benchmarks.machine_code`."""
