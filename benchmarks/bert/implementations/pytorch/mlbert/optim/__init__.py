"""Optimizers on flat buffers and their plain specifications."""
