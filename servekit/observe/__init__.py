"""What a process says about itself: metrics and logs."""
