"""What a module is made of: which of its modules use a unit, patterns of paths, tensors in what it returns; a head with its loss."""
