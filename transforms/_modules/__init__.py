"""What a module is made of: which modules use a unit, patterns of paths, tensors in what it returns, a head with a loss."""
