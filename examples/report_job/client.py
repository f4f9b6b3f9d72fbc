"""Submit a report and follow it: `python examples/report_job/client.py [URL] [PATTERN]`.

Ctrl-C cancels the job. Kill the server instead, start it again, and run `servekit jobs list`.
"""

import sys

import servekit

WIDTH = 40

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000"
pattern = sys.argv[2] if len(sys.argv) > 2 else "*.py"

with servekit.Client(url) as client:
    job = client.submit("longest_functions", pattern=pattern)
    print(f"job {job.id}")
    try:
        for event in job.events():
            share = event.progress.fraction or 0.0 if event.progress else 0.0
            name = event.progress.message if event.progress else event.status
            bar = "█" * int(share * WIDTH)
            print(f"\r{bar:<{WIDTH}} {share:4.0%}  {name:<24}", end="", flush=True)
    except KeyboardInterrupt:
        print(f"\n{job.cancel().status}")
    else:
        report = job.result()
        print(f"\n{report['files']} files, {report['lines']} lines")
        for function in report["longest"]:
            print(f"{function['lines']:5}  {function['module']}.{function['name']}")
