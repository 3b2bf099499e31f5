"""Is a compressed gradient still good? Asked of one batch, or again and again while training."""
