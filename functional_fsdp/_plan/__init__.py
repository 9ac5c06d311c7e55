"""What follows, pure, for any number of ranks: layout, routes, lifetimes, addresses, where a program stands."""
