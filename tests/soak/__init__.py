"""The soak suite: the figures of docs/reliability.md, measured on this machine.

`python -m tests.soak` takes half an hour, `--quick` some minutes. `make test` runs the same
functions for seconds (tests/flow/test_reliability.py), and does not insist on times.
"""
