"""What `extend` gives to transforms: changes to a state, and sessions, which drive the units of one."""
