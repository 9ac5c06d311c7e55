"""A gradient for each sample, and what is made of them."""
