"""What becomes of the attentions of a model, without running it.

A folder called `explain` would hide the function `dash_inductor.explain`.
"""
