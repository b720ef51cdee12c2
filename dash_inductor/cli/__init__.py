"""One module per command of `python -m dash_inductor`, and tables on the terminal."""
