"""Policies on the way of a call: limits, retries, breakers."""
