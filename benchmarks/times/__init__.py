"""What the package costs on a CPU: imports, choices, simulations."""
