"""Numbers, revisions and deaths, on Ray: tests of `tests/flow`, run there."""

from tests.flow.test_faults import test_a_health_hook_that_raises
from tests.flow.test_promises import test_a_client_that_leaves_ends_all_of_it
from tests.flow.test_scaling import (
    test_a_call_is_held_within_its_deadline,
    test_grows_under_load_and_comes_back,
    test_sleeps_and_wakes,
)
