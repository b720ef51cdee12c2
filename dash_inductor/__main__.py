"""`python -m dash_inductor`, and the script `dash-inductor`."""

import os
import sys

from dash_inductor.cli.main import main


def run() -> None:
    """The command line, as a process that ends with it."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    run()
