"""What every other folder may use: errors, pytrees by path, torch's private names, who is tracing, interrupts."""
