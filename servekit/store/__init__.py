"""Models on this machine: fetched once, known by their content."""
