"""Collects samples, takes medians, and shows them as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeAlias

from benchmarks.contenders import LIMIT, RAY_TUNED, SERVEKIT
from benchmarks.load import Sample
from benchmarks.workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results" / "latest.json"
_HEADER = (
    f"{'contender':<12} {'conns':>5} {'median':>9} {'/limit':>7} {'/servekit':>9} "
    f"{'/ray-tuned':>10} {'P50 ms':>8} {'P99 ms':>8} {'CPU us/req':>10} {'noise':>5}  note"
)

Key: TypeAlias = tuple[str, str, int]
"""Workload, contender, connections."""


@dataclass(slots=True)
class Report:
    """All samples of a run: by cell, then by round."""

    machine: dict[str, str | int | None]
    settings: dict[str, object]
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    samples: dict[Key, dict[int, Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, int] = field(default_factory=dict)
    start_seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, key: Key, round_number: int, sample: Sample) -> None:
        """Record one sample."""
        self.samples.setdefault(key, {})[round_number] = sample

    def ratio(self, key: Key, baseline: str) -> float | None:
        """Median over the rounds of this cell's rate by the baseline's in the same round."""
        workload, _, connections = key
        base = self.samples.get((workload, baseline, connections), {})
        own = self.samples[key]
        ratios = [
            own[number].requests_per_second / base[number].requests_per_second
            for number in own
            if number in base and own[number].valid and base[number].valid
        ]
        return median(ratios) if ratios else None

    def table(self) -> str:
        """The plain table."""
        lines = [f"{self.machine['cpu']}, {self.machine['cores']} cores, {self.machine['date']}"]
        for name, workload in WORKLOADS.items():
            keys = [key for key in self.samples if key[0] == name]
            if not keys:
                continue
            lines += ["", f"{name}: {workload.title} [{workload.unit}]", _HEADER]
            lines += [self._row(key) for key in sorted(keys, key=lambda key: key[2])]
        if self.failures:
            lines += ["", "not measured:"]
            lines += [f"  {cell}: {why.splitlines()[0]}" for cell, why in self.failures.items()]
        return "\n".join(lines)

    def _row(self, key: Key) -> str:
        workload, contender, connections = key
        samples = list(self.samples[key].values())
        rate = median(s.requests_per_second for s in samples)
        rate *= WORKLOADS[workload].units_per_request
        errors = sum(s.errors for s in samples)
        invalid = f"INVALID: {errors} errors" if errors else "INVALID: no answer in time"
        note = "" if all(s.valid for s in samples) else invalid
        chunks = self.chunks.get(f"{workload}/{contender}", 1)
        if WORKLOADS[workload].units_per_request > 1 and not note:
            note = f"{chunks} chunks"
        return (
            f"{contender:<12} {connections:>5} {rate:>9,.0f} {_times(self.ratio(key, LIMIT)):>7} "
            f"{_times(self.ratio(key, SERVEKIT)):>9} {_times(self.ratio(key, RAY_TUNED)):>10} "
            f"{median(s.p50_ms for s in samples):>8.2f} {median(s.p99_ms for s in samples):>8.2f} "
            f"{median(s.cpu_us_per_request for s in samples):>10,.0f} "
            f"{median(s.foreign_cores for s in samples):>5.2f}  {note}"
        ).rstrip()

    def write(self, path: Path = RESULTS) -> None:
        """Write everything as JSON."""
        cells = [
            {
                "workload": key[0],
                "contender": key[1],
                "connections": key[2],
                "valid": all(sample.valid for sample in rounds.values()),
                "requests_per_second": median(s.requests_per_second for s in rounds.values()),
                "ratio_to_limit": self.ratio(key, LIMIT),
                "ratio_to_servekit": self.ratio(key, SERVEKIT),
                "ratio_to_ray_tuned": self.ratio(key, RAY_TUNED),
                "rounds": {number: asdict(sample) for number, sample in rounds.items()},
            }
            for key, rounds in self.samples.items()
        ]
        document = {
            "machine": self.machine,
            "settings": self.settings,
            "cells": cells,
            "failures": self.failures,
            "chunks_per_answer": self.chunks,
            "start_seconds": self.start_seconds,
            "versions": self.versions,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
