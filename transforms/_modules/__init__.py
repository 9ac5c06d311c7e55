"""What a module is made of: units that it uses, patterns of paths, tensors in what it returns; a head with a loss."""
