"""What makes an app self-contained: bundles, and images for container engines."""
