"""What becomes of the attentions of a model, without running it."""
