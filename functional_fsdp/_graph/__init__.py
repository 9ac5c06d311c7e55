"""The other interpreter: the verbs inside a traced step, and whole steps as graphs."""
