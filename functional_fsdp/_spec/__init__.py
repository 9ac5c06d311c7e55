"""What you ask for: placements, precision, units, a schedule and a transport, as values."""
