"""Models of transformers, at toy size: which of their attentions are rewritten, and whether they train right."""
