"""Models of many libraries at the head dims that people train: how many of their attentions are rewritten, and why not the rest."""
