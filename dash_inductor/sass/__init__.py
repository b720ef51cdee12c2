"""Machine code read back: what it is made of, which rules it breaks, what its main loop waits for."""
