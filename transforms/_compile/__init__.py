"""Units by torch.compile, and whole steps as one program of Inductor's."""
