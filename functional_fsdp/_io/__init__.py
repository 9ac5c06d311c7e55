"""States in files: checkpoints of this library, safetensors, and checkpoints of other packages."""
