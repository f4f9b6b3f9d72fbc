"""The metrics that gateway and replicas report, defined once.

Each call is counted by the first of our processes that sees it: the gateway counts clients' calls,
a replica those that other services send it (`Call.internal`). So no call is in a merged figure
twice. Queues, batches and what runs now are a replica's alone.
"""

from servekit.observe.metrics import Metrics

# A 1-2-5 series: near enough to exponential, and its edges are the limits that people write.
SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1,
    0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
ROWS = tuple(float(2**power) for power in range(11))
JOB_SECONDS = (
    0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 14_400.0, 86_400.0,
)  # fmt: skip
RATIO = tuple(tenths / 10 for tenths in range(1, 11))

_ENDPOINT = ("service", "endpoint")


class Families:
    """Every family of a process, ready to bind: `families.requests.labels(service=…, …)`.

    Attributes:
        requests: Finished calls, by the code of their outcome (an HTTP status).
        request_seconds: From the first byte in to the last byte out.
        queue_seconds: Wait in the replica before the call ran.
        batch_size: Rows in an executed batch, before padding.
        batch_fill_ratio: Those rows as a share of the largest batch allowed.
        in_flight: Calls running now.
        queued: Calls waiting now.
        shed: Calls refused before they ran, by reason (`CallError.reason`).
        jobs: Jobs that have not ended, by status: queued or running.
        jobs_ended: Jobs that have, by status.
        job_queue_seconds: Wait of a job, from when an attempt could have begun until it did.
        job_run_seconds: Duration of an attempt.
        connections_refused: Connections that were one too many.
        replicas: Replicas, by state.
        replica_restarts: Replicas started again, by what ended the one before.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "servekit_requests_total",
            "Finished calls, by outcome.",
            (*_ENDPOINT, "version", "code"),
        )
        self.request_seconds = metrics.histogram(
            "servekit_request_seconds",
            "Time from receiving a call to the end of its answer.",
            _ENDPOINT,
            bounds=SECONDS,
        )
        self.queue_seconds = metrics.histogram(
            "servekit_queue_seconds",
            "Time that a call waited in the replica before it ran.",
            _ENDPOINT,
            bounds=SECONDS,
        )
        self.batch_size = metrics.histogram(
            "servekit_batch_size", "Rows in an executed batch.", _ENDPOINT, bounds=ROWS
        )
        self.batch_fill_ratio = metrics.histogram(
            "servekit_batch_fill_ratio",
            "Rows in an executed batch, as a share of the most allowed.",
            _ENDPOINT,
            bounds=RATIO,
        )
        self.in_flight = metrics.gauge("servekit_in_flight", "Calls running now.", _ENDPOINT)
        self.queued = metrics.gauge("servekit_queued", "Calls waiting now.", _ENDPOINT)
        self.shed = metrics.counter(
            "servekit_shed_total", "Calls refused before they ran.", (*_ENDPOINT, "reason")
        )
        self.jobs = metrics.gauge(
            "servekit_jobs", "Jobs that have not ended, by status.", (*_ENDPOINT, "status")
        )
        self.jobs_ended = metrics.counter(
            "servekit_jobs_ended_total", "Jobs that have ended, by status.", (*_ENDPOINT, "status")
        )
        self.job_queue_seconds = metrics.histogram(
            "servekit_job_queue_seconds",
            "Time from when an attempt at a job could have begun until it did.",
            _ENDPOINT,
            bounds=JOB_SECONDS,
        )
        self.job_run_seconds = metrics.histogram(
            "servekit_job_run_seconds",
            "Duration of an attempt at a job.",
            _ENDPOINT,
            bounds=JOB_SECONDS,
        )
        self.connections_refused = metrics.counter(
            "servekit_connections_refused_total", "Connections that were one too many.", ()
        )
        self.replicas = metrics.gauge(
            "servekit_replicas", "Replicas, by state.", ("service", "state")
        )
        self.replica_restarts = metrics.counter(
            "servekit_replica_restarts_total", "Replicas started again.", ("service", "cause")
        )
