"""`python -m benchmarks`: measures all contenders in interleaved rounds."""

import argparse
import signal
import sys

from benchmarks import processes
from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.environment import UnavailableError, machine, prepare, versions
from benchmarks.load import measure, require_wrk
from benchmarks.report import RESULTS, Report
from benchmarks.server import StartError, running
from benchmarks.workloads import WORKLOADS, Workload


def main() -> None:
    """Prepare the environments, run the rounds, show the table."""
    options = _parser().parse_args()
    if options.quick:
        options.rounds, options.seconds, options.warm_up = 1, 2.0, 1.0
    require_wrk()
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    report = Report(machine(), vars(options))
    contenders = _prepared([CONTENDERS[name] for name in options.only], report)
    for name in options.workloads:
        workload = WORKLOADS[name]
        for round_number in range(options.rounds):
            for contender in contenders:
                if name in contender.paths and f"{name}/{contender.name}" not in report.failures:
                    _cell(contender, workload, round_number, options, report)
        report.write()
    print(f"\n{report.table()}\n\nwritten to {RESULTS}")


def _prepared(contenders: list[Contender], report: Report) -> list[Contender]:
    ready: list[Contender] = []
    for contender in contenders:
        try:
            prepare(contender)
        except UnavailableError as why:
            report.failures[contender.name] = str(why)
            print(f"{contender.name} is left out: {why}", flush=True)
            continue
        report.versions[contender.name] = versions(contender)
        ready.append(contender)
    return ready


def _cell(
    contender: Contender,
    workload: Workload,
    round_number: int,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Measure one contender on one workload at every number of connections."""
    cell = f"{workload.name}/{contender.name}"
    try:
        with running(contender, workload) as server:
            report.chunks[cell] = server.chunks
            report.start_seconds.setdefault(cell, []).append(round(server.start_seconds, 2))
            for connections in options.connections:
                sample = measure(server, workload, connections, options.warm_up, options.seconds)
                report.add((workload.name, contender.name, connections), round_number, sample)
                print(
                    f"round {round_number + 1} {cell:<20} {connections:>3} connections "
                    f"{sample.requests_per_second:>9,.0f} req/s  {sample.errors} errors",
                    flush=True,
                )
    except StartError as why:
        report.failures[cell] = str(why)
        print(f"{cell} failed: {why}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME",
        help=f"contenders: {', '.join(CONTENDERS)}")  # fmt: skip
    add("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS, metavar="NAME",
        help=f"workloads: {', '.join(WORKLOADS)}")  # fmt: skip
    add("--rounds", type=int, default=3, help="interleaved rounds (%(default)s)")
    add("--seconds", type=float, default=6.0, help="length of a measurement (%(default)s)")
    add("--warm-up", type=float, default=2.0, help="load before it (%(default)s)")
    add("--connections", type=int, nargs="+", default=[1, 32], help="(%(default)s)")
    add("--quick", action="store_true", help="one round of 2 s: does everything still run?")
    return parser


if __name__ == "__main__":
    main()
