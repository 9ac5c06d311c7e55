"""Steps on paper: how long they take, what they need, which settings are best, from operations, bytes and hardware."""
