"""The Ray engine: Ray Serve places, starts, checks and scales; requests go over our own wire."""
