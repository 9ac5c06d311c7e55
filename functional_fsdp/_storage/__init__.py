"""What a rank keeps of a bucket: flat buffers, the weights seen in them, and where gathered units lie."""
