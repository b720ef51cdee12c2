"""Whether anything but the backward of attention changes: suites of cases, compiled with the package and without it."""
