"""What several satellites use, and the core does not."""
