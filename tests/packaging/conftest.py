"""Async tests run on a loop of their own."""

from tests.flow.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
