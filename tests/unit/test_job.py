"""The life of a job: what each transition does, and what holds after any of them."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from servekit.core.call import JSON, Payload
from servekit.core.job import FINAL, JobError, JobProgress
from servekit.errors import Conflict, SpecError
from servekit.jobs import job as life
from servekit.jobs.job import LEASE_S, MAX_BACKOFF_S, Job, new_job, status_of
from servekit.spec.policy import TaskPolicy

pytestmark = pytest.mark.slow

ERROR = JobError("execution_error", "it raised")
T0 = 1_800_000_000.0


def job(**policy) -> Job:
    return new_job("S", "t", TaskPolicy(**{"backoff_s": 1.0, "retries": 2} | policy), now=T0)


def claimed(made: Job, now: float = T0) -> Job:
    taken = life.claimed(made, now, "w")
    assert taken is not None
    return taken


# -- one step


def test_a_claim_starts_an_attempt_with_a_lease():
    taken = claimed(job(), T0 + 3)
    assert (taken.status, taken.attempt, taken.worker) == ("running", 1, "w")
    assert taken.due == T0 + 3 + LEASE_S
    assert taken.waited_s == 3
    assert taken.expires_at is None
    assert life.claimed(taken, T0 + 3, "other") is None


@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999])
def test_failures_wait_for_twice_as_long_each_and_end_with_the_retries(jitter):
    at, made = T0, job(retries=3, backoff_s=2.0)
    for wait_s in (2, 4, 8):
        taken = claimed(made, at)
        made = life.failed(taken, taken.attempt, ERROR, at, jitter=jitter)
        assert made.status == "queued"
        assert made.error == ERROR
        assert wait_s / 2 <= made.due - at <= wait_s
        assert life.claimed(made, made.due - 0.01, "w") is None
        at = made.due
    taken = claimed(made, at)
    assert taken.error is None
    made = life.failed(taken, 4, ERROR, at, jitter=jitter)
    assert (made.status, made.attempt, made.error, made.due) == ("failed", 4, ERROR, None)


def test_the_wait_has_a_cap():
    made = job(retries=100_000, backoff_s=1.0)
    at = T0
    for _ in range(2000):
        taken = claimed(made, at)
        made = life.failed(taken, taken.attempt, ERROR, at, jitter=0.0)
        assert made.due - at <= MAX_BACKOFF_S
        at = made.due
    assert made.due - made.changed_at == MAX_BACKOFF_S


def test_what_is_permanent_is_not_tried_again():
    taken = claimed(job())
    assert life.failed(taken, 1, ERROR, T0, jitter=0, permanent=True).status == "failed"


def test_a_job_that_kills_its_workers_is_not_handed_out_for_ever():
    at, made = T0, job(retries=2, backoff_s=0)
    for attempt in (1, 2, 3):
        taken = claimed(made, at)
        assert taken.attempt == attempt
        assert life.lost(taken, taken.due - 0.01, jitter=0) is None
        at = taken.due
        made = life.lost(taken, at, jitter=0)
    assert made.status == "failed"
    assert made.error.reason == "worker_lost"


def test_a_job_that_was_given_back_has_all_its_retries():
    made = job(retries=0)
    for attempt in range(1, 6):
        taken = claimed(made)
        made = life.given_back(taken, attempt, T0)
        assert (made.status, made.failures, made.due) == ("queued", 0, T0)


def test_an_earlier_attempt_has_no_say():
    first = claimed(job())
    second = claimed(life.lost(first, first.due, jitter=1.0), first.due + 1)
    assert second.attempt == 2
    assert life.renewed(second, 1, T0) is None
    assert life.progressed(second, 1, JobProgress(0.5), T0) is None
    assert life.succeeded(second, 1, T0) is None
    assert life.failed(second, 1, ERROR, T0, jitter=0) is None
    assert life.given_back(second, 1, T0) is None
    assert life.succeeded(second, 2, T0).status == "succeeded"


@pytest.mark.parametrize("end", ["succeed", "fail", "give back", "lose"])
def test_a_job_that_was_asked_to_stop_ends_cancelled(end):
    taken = life.cancelled(claimed(job()), T0)
    assert (taken.status, taken.cancelling) == ("running", True)
    ended = {
        "succeed": life.succeeded(taken, 1, T0),
        "fail": life.failed(taken, 1, ERROR, T0, jitter=0),
        "give back": life.given_back(taken, 1, T0),
        "lose": life.lost(taken, taken.due, jitter=0),
    }[end]
    assert (ended.status, ended.cancelling) == ("cancelled", False)


def test_what_callers_may_not_do_is_a_conflict_that_names_the_state():
    done = life.succeeded(claimed(job()), 1, T0)
    with pytest.raises(Conflict, match="has succeeded already") as caught:
        life.cancelled(done, T0)
    assert caught.value.reason == "succeeded"
    for made in (job(), claimed(job()), done):
        with pytest.raises(Conflict) as caught:
            life.retried(made, T0)
        assert caught.value.reason == made.status


def test_a_retry_by_hand_starts_afresh():
    failed = life.failed(claimed(job(retries=0)), 1, ERROR, T0, jitter=0)
    again = life.retried(failed, T0 + 100)
    assert (again.status, again.failures, again.error) == ("queued", 0, None)
    assert again.due == T0 + 100
    assert claimed(again, T0 + 100).attempt == 2, "a token is never used twice"


def test_what_waited_too_long_expires_and_can_be_revived():
    made = job(ttl_s=10)
    assert life.expired(made, T0 + 9) is None
    gone = life.expired(made, T0 + 10)
    assert (gone.status, gone.error.code, gone.expires_at) == ("expired", "expired", T0 + 20)
    assert life.retried(gone, T0 + 15).expires_at == T0 + 25
    assert life.expired(claimed(made), T0 + 1000) is None


def test_payloads_are_kept_with_their_segments():
    payload = Payload(JSON, (b"{}", bytearray(b"\0\1"), memoryview(b"view")))
    found, internal = life.unpack_payload(life.pack_payload(payload, internal=True))
    assert internal
    assert (found.content_type, list(found.segments)) == (JSON, [b"{}", b"\0\1", b"view"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"backoff_s": -1},
        {"backoff_s": math.inf},
        {"timeout_s": 0},
        {"ttl_s": 0},
        {"ttl_s": math.inf},
        {"max_concurrency": 0},
        {"max_queued": 0},
    ],
)
def test_policies_have_bounds(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(SpecError, match=rf"task\({name}={value}\)"):
        TaskPolicy(**wrong)


# -- any steps


class Life(RuleBasedStateMachine):
    """One job, any number of workers, callers that do what they like, and time."""

    @initialize(
        retries=st.integers(0, 3), backoff_s=st.sampled_from([0.0, 1.0]), ttl_s=st.just(60.0)
    )
    def begin(self, **policy):
        self.now = T0
        self.job = job(**policy)
        self.before = self.job
        self.tokens: list[int] = []
        self.outcomes = 0
        self.started = 0  # attempts since the last retry by hand that were not given back

    def become(self, after: Job | None) -> bool:
        if after is not None:
            self.before, self.job = self.job, after
        return after is not None

    @rule(seconds=st.sampled_from([0.0, 0.1, 5.0, LEASE_S, 61.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def claim(self):
        if self.become(life.claimed(self.job, self.now, "w")):
            assert self.job.attempt not in self.tokens
            self.tokens.append(self.job.attempt)
            self.started += 1

    @rule(data=st.data(), act=st.sampled_from(["renew", "progress", "succeed", "fail", "back"]))
    def worker_says(self, data, act):
        if not self.tokens:
            return
        token = data.draw(st.sampled_from(self.tokens[-3:]))
        was = self.job
        after = {
            "renew": lambda: life.renewed(was, token, self.now),
            "progress": lambda: life.progressed(was, token, JobProgress(0.1), self.now),
            "succeed": lambda: life.succeeded(was, token, self.now),
            "fail": lambda: life.failed(was, token, ERROR, self.now, jitter=0.5),
            "back": lambda: life.given_back(was, token, self.now),
        }[act]()
        held = was.status == "running" and token == was.attempt
        assert self.become(after) == held
        if held and act == "back" and self.job.status == "queued":
            self.started -= 1

    @rule()
    def reaper(self):
        was = self.job
        if self.become(life.lost(was, self.now, jitter=0.5)):
            assert was.status == "running"
            assert self.now >= was.due

    @rule()
    def expire(self):
        self.become(life.expired(self.job, self.now))

    @rule(act=st.sampled_from([life.cancelled, life.retried]))
    def caller(self, act):
        was = self.job
        try:
            self.become(act(was, self.now))
        except Conflict as error:
            assert error.reason == was.status
        else:
            if act is life.retried:
                assert was.status in ("failed", "cancelled", "expired")
                self.started = 0

    @invariant()
    def is_consistent(self):
        made = self.job
        assert made.failures <= made.policy.retries + 1
        assert self.started <= made.policy.retries + 1
        assert (made.due is None) == (made.status in FINAL)
        assert (made.expires_at is None) == (made.status == "running")
        assert (made.finished_at is not None) == (made.status in FINAL)
        assert made.cancelling <= (made.status == "running")
        if made.status == "failed":
            assert made.error is not None
        status = status_of(made)
        assert (status.id, status.status) == (made.id, made.status)

    @invariant()
    def tells_every_change(self):
        was, is_ = self.before, self.job
        visible = (was.status, was.attempt, was.progress) != (is_.status, is_.attempt, is_.progress)
        assert is_.events - was.events in ((1,) if visible else (0, 1))
        if is_.events > was.events:
            assert life.event_of(is_).number == is_.events


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=400, stateful_step_count=30)
