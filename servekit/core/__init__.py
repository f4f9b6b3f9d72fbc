"""What every floor above agrees on: calls, replies, deadlines, units, clocks."""
