"""DFlash: config, block maths, the draft network and its loss."""
