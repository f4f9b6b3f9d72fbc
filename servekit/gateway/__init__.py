"""The front door: HTTP in, calls on the wire out. No user code runs or is imported here."""
