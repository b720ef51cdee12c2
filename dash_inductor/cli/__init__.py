"""One module per command of `python -m dash_inductor`; plots and tables on the terminal."""
