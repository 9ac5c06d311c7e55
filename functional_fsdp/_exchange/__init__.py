"""Weights and optimizer states from other packages' checkpoints, and out to whoever runs them."""
