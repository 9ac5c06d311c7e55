"""Looks at steps that ran: fingerprints, and two runs compared. No folder below imports it."""
