"""One application per contender, all doing the same work."""
