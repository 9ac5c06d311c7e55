"""Axes along which a model communicates itself (tensor, sequence, expert parallel): rules, cuts of leaves, DTensors."""
