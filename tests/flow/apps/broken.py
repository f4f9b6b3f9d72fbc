"""An app that raises while it is imported."""

ANSWER = 1 / 0
