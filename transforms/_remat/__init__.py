"""What a backward needs of a forward: kept, computed again, or moved to the host's memory and back."""
