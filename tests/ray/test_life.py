"""Numbers, revisions, deaths, jobs and streams into an app, on Ray: tests of `tests/flow`, run there."""

from tests.flow.test_client import test_a_written_client_calls_every_kind_of_endpoint
from tests.flow.test_faults import test_a_health_hook_that_raises
from tests.flow.test_jobs import (
    test_kill_9_of_the_replica_starts_its_jobs_again,
    test_running_jobs_are_cancelled,
)
from tests.flow.test_promises import test_a_client_that_leaves_ends_all_of_it
from tests.flow.test_scaling import (
    test_a_call_is_held_within_its_deadline,
    test_grows_under_load_and_comes_back,
    test_sleeps_and_wakes,
)
