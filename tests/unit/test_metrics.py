"""Metrics: what is counted, merged and rendered."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from servekit.errors import SpecError
from servekit.observe.families import Families
from servekit.observe.metrics import (
    OTHER,
    Aggregate,
    FamilySnapshot,
    Metrics,
    Sample,
    Snapshot,
    merge,
    render,
)


def parsed(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what Prometheus reads: value by sample name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render(snapshot))
        for sample in family.samples
    }


def figures(snapshot: Snapshot) -> dict[str, dict[tuple[str, ...], Sample]]:
    """Return a snapshot without its order."""
    return {family.name: {s.labels: s for s in family.samples} for family in snapshot}


def test_a_series_is_bound_once_and_is_the_same_object():
    family = Metrics().counter("calls_total", "Calls.", ("service", "code"))
    series = family.labels(service="A", code=200)
    series.inc()
    family.labels(code="200", service="A").inc(2)
    assert series.value == 3
    assert len(family) == 1


def test_gauge_moves_both_ways():
    gauge = Metrics().gauge("queued", "Waiting.").labels()
    gauge.set(5)
    gauge.inc()
    gauge.dec(2)
    assert gauge.value == 4


def test_a_value_on_a_bound_is_in_that_bucket():
    histogram = Metrics().histogram("size", "Rows.", bounds=(1, 2, 4)).labels()
    for value in (0.5, 1, 1.5, 2, 4, 4.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.sum == 13.5


def test_render_is_what_prometheus_reads():
    metrics = Metrics()
    metrics.counter("calls_total", "Calls.", ("service",)).labels(service="A").inc(3)
    metrics.gauge("queued", "Waiting.").labels().set(2)
    histogram = metrics.histogram("wait_seconds", "Wait.", ("service",), bounds=(0.5, 2))
    for value in (0.1, 1, 1, 9):
        histogram.labels(service="A").observe(value)
    a = ("service", "A")
    assert parsed(metrics.snapshot()) == {
        ("calls_total", (a,)): 3,
        ("queued", ()): 2,
        ("wait_seconds_bucket", (("le", "0.5"), a)): 1,
        ("wait_seconds_bucket", (("le", "2.0"), a)): 3,
        ("wait_seconds_bucket", (("le", "+Inf"), a)): 4,
        ("wait_seconds_count", (a,)): 4,
        ("wait_seconds_sum", (a,)): 11.1,
    }


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(codec="ascii")))
def test_any_text_survives_as_a_label_or_a_description(label, doc):
    metrics = Metrics()
    metrics.counter("calls_total", doc, ("path",)).labels(path=label).inc()
    # The parser splits lines as str.splitlines would; Prometheus splits at "\n" alone.
    if len(label.splitlines()) <= 1 and "\r" not in doc and len(doc.splitlines()) <= 1:
        assert parsed(metrics.snapshot()) == {("calls_total", (("path", label),)): 1}


def test_render_of_nothing_is_empty():
    Families(metrics := Metrics())
    assert metrics.snapshot() == ()
    assert render(()) == ""


def test_ten_thousand_label_values_make_a_bounded_number_of_series():
    metrics = Metrics(max_series=20)
    family = metrics.counter("calls_total", "Calls.", ("service", "path"))
    early = family.labels(service="A", path="/0")
    for number in range(10_000):
        family.labels(service="A", path=f"/{number}").inc()
    assert len(family) == 21
    assert family.labels(service=OTHER, path=OTHER).value == 10_000 - 20
    assert family.labels(service="A", path="/0") is early
    assert metrics.statistics() == {"calls_total": 21}


@pytest.mark.parametrize("labels", [{}, {"service": "A"}, {"service": "A", "cod": 1}, {"code": 2}])
def test_wrong_labels_are_refused(labels):
    family = Metrics().counter("calls_total", "Calls.", ("service", "code"))
    with pytest.raises(SpecError, match=r"calls_total: labels are \['service', 'code'\]"):
        family.labels(**labels)


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (lambda m: m.counter("calls", "Calls."), "calls_total"),
        (lambda m: m.gauge("a-b", "X."), "letters, digits"),
        (lambda m: m.gauge("a", "X.", ("1st",)), "can't be a label"),
        (lambda m: m.gauge("a", "X.", ("__name__",)), "can't be a label"),
        (lambda m: m.gauge("a", "X.", ("b", "b")), "can't be a label"),
        (lambda m: m.gauge("a", "X.", ("replica",), per_replica=True), "can't be a label"),
        (lambda m: m.histogram("a", "X.", ("le",), bounds=(1,)), "can't be a label"),
        (lambda m: m.histogram("a", "X.", bounds=()), "must ascend"),
        (lambda m: m.histogram("a", "X.", bounds=(1, 1)), "must ascend"),
        (lambda m: m.histogram("a", "X.", bounds=(1, float("nan"))), "must ascend"),
        (lambda m: (m.gauge("a", "X."), m.gauge("a", "X.")), "defined twice"),
    ],
)
def test_bad_definitions_are_refused(define, message):
    with pytest.raises(SpecError, match=message):
        define(Metrics())


def test_a_snapshot_travels_as_msgpack():
    metrics = Metrics(replica="A-1")
    families = Families(metrics)
    families.requests.labels(service="A", endpoint="f", version="1", code=200).inc()
    families.request_seconds.labels(service="A", endpoint="f").observe(0.003)
    snapshot = metrics.snapshot()
    data = msgspec.msgpack.encode(snapshot)
    assert msgspec.msgpack.decode(data, type=Snapshot) == snapshot
    plain = msgspec.msgpack.decode(data)
    assert plain[0][:3] == ["servekit_requests_total", "Finished calls, by outcome.", "counter"]


def test_per_replica_gauges_stay_apart_and_others_add_up():
    snapshots = []
    for replica, value in (("A-0", 2), ("A-1", 3)):
        metrics = Metrics(replica=replica)
        metrics.gauge("memory_bytes", "Memory.", per_replica=True).labels().set(value)
        metrics.gauge("in_flight", "Running.").labels().set(value)
        snapshots.append(metrics.snapshot())
    assert parsed(merge(snapshots)) == {
        ("memory_bytes", (("replica", "A-0"),)): 2,
        ("memory_bytes", (("replica", "A-1"),)): 3,
        ("in_flight", ()): 5,
    }


def test_unlike_families_are_not_added():
    snapshots = []
    for bounds in ((1, 2), (1, 2, 4)):
        metrics = Metrics()
        metrics.histogram("size", "Rows.", bounds=bounds).labels().observe(1)
        snapshots.append(metrics.snapshot())
    (family,) = merge(snapshots)
    assert family.bounds == (1, 2)
    assert family.samples[0].counts == (1, 0, 0)


# Whole numbers, so that float addition is exact and the laws hold to the bit.
whole = st.integers(0, 1000)
keys = st.sampled_from([("A",), ("B",), ("C",)])


@st.composite
def snapshots(draw):
    counters = draw(st.dictionaries(keys, whole))
    histograms = draw(st.dictionaries(keys, st.tuples(whole, whole, whole)))
    return (
        FamilySnapshot(
            "calls_total",
            "Calls.",
            "counter",
            ("service",),
            (),
            tuple(Sample(key, float(value)) for key, value in counters.items()),
        ),
        FamilySnapshot(
            "size",
            "Rows.",
            "histogram",
            ("service",),
            (1.0, 2.0),
            tuple(Sample(key, float(sum(c)), c) for key, c in histograms.items()),
        ),
    )[: draw(st.integers(0, 2))]


@settings(max_examples=50, deadline=None)
@given(snapshots(), snapshots(), snapshots())
def test_merging_is_a_commutative_monoid(a, b, c):
    assert figures(merge((a, b))) == figures(merge((b, a)))
    assert merge((merge((a, b)), c)) == merge((a, merge((b, c)))) == merge((a, b, c))
    assert merge((a, ())) == merge(((), a)) == merge((a,)) == a
    assert merge(()) == ()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), snapshots(), st.booleans()), max_size=12))
def test_totals_never_fall_when_processes_end(steps):
    aggregate = Aggregate()
    runs: dict[str, int] = {}
    expected: list[Snapshot] = []
    for name, snapshot, ends in steps:
        source = f"{name}{runs.get(name, 0)}"
        before = figures(aggregate.snapshot())
        if ends:
            aggregate.put(source, snapshot)
            grown = figures(aggregate.snapshot())
            aggregate.retire(source)
            aggregate.retire(source)
            assert figures(aggregate.snapshot()) == grown
            runs[name] = runs.get(name, 0) + 1
            expected.append(snapshot)
            for family, series in before.items():
                for labels, sample in series.items():
                    assert grown[family][labels].value >= sample.value
    assert figures(aggregate.snapshot()) == figures(merge(expected))


def test_gauges_of_ended_processes_are_dropped():
    metrics = Metrics()
    metrics.gauge("in_flight", "Running.").labels().set(3)
    metrics.counter("calls_total", "Calls.").labels().inc(3)
    aggregate = Aggregate()
    aggregate.put("A-0", metrics.snapshot())
    assert aggregate.statistics() == {"sources": 1, "series": 2}
    aggregate.retire("A-0")
    aggregate.retire("never seen")
    assert parsed(aggregate.snapshot()) == {("calls_total", ()): 3}
    assert aggregate.statistics() == {"sources": 0, "series": 1}


def test_what_runs_now_decides_the_shape():
    old, new = Metrics(), Metrics()
    old.histogram("size", "Rows.", bounds=(1,)).labels().observe(1)
    new.histogram("size", "Rows.", bounds=(2,)).labels().observe(1)
    aggregate = Aggregate()
    aggregate.put("A-0", old.snapshot())
    aggregate.put("A-1", new.snapshot())
    aggregate.retire("A-0")
    assert aggregate.snapshot()[0].bounds == (2,)


def test_the_families_are_these():
    metrics = Metrics()
    Families(metrics)
    assert list(metrics.statistics()) == [
        "servekit_requests_total",
        "servekit_request_seconds",
        "servekit_queue_seconds",
        "servekit_batch_size",
        "servekit_batch_fill_ratio",
        "servekit_in_flight",
        "servekit_queued",
        "servekit_shed_total",
        "servekit_jobs",
        "servekit_jobs_ended_total",
        "servekit_job_queue_seconds",
        "servekit_job_run_seconds",
        "servekit_connections_refused_total",
        "servekit_replicas",
        "servekit_replica_restarts_total",
    ]


def test_importing_is_light():
    code = (
        "import sys, servekit.observe.families, servekit.observe.log\n"
        "heavy = {'prometheus_client', 'structlog'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
