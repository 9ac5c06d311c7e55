"""The verbs of a train step, metrics, and how a transform changes a state."""
