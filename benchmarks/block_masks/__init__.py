"""Orders that need no plan, for masks that are known only at run time."""
