"""`python -m dash_inductor`, and the script `dash-inductor`."""

from dash_inductor.cli.main import PROGRAM

run = PROGRAM.run

if __name__ == "__main__":
    run()
