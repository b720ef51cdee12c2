"""A CUDA error stays with its process: every later call fails. So the process ends with the test that caused it.

Under xdist another worker takes its place and runs what is left; xdist counts that test twice, as failed and as the one that ended
the worker. Without xdist what is left is not run, and pytest says so.
"""

import os
import sys
from collections.abc import Generator

import pytest
import torch


def error() -> str | None:
    """What the device says since it is lost; None if it still works, or there is none."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as fault:
        return str(fault).splitlines()[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """After the test and its reports, whatever became of it: a fault may come to light in none of its calls."""
    result = yield
    lost = error()
    if lost is not None:
        said = f"the device is lost after {item.nodeid}: {lost}"
        if os.environ.get("PYTEST_XDIST_WORKER"):
            print(said, file=sys.stderr, flush=True)
            os._exit(1)
        pytest.exit(f"{said}; the tests that are left were not run", returncode=1)
    return result
