"""Memory of the host: what lies there is updated in portions, what that costs, and copies to and from it."""
