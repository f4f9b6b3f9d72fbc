"""What keeps services standing under load: state machines that do no I/O and read no clock."""
