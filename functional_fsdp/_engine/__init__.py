"""The eager interpreter: carries out a plan on lanes, in an arena."""
