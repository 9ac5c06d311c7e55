"""Modules that have the weights of a state, for what wants an nn.Module."""
