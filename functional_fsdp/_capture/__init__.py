"""Steps that are captured once and replayed: votes, vetoes, and updates where gradients arrive."""
