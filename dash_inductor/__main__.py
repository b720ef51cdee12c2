"""`python -m dash_inductor`."""

import sys

from dash_inductor.cli import main

if __name__ == "__main__":
    sys.exit(main())
