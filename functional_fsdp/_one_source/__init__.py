"""`shard(src=)`: one rank has the values, and every other one gets them from it."""
