"""The kernels of one pass: each module has `launch(inputs, tile, walk, mods, scratch, dv)`, which fills these and returns dk."""
