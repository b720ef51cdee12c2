"""The pass: how it gets into Inductor, and one module per source of attention."""
