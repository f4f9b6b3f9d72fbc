"""Print the writer's words as they arrive: `python examples/streaming/client.py [URL]`."""

import sys

import servekit

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:3000"
with servekit.Client(url) as client:
    for word in client.stream("write", words=80):
        print(word, end="", flush=True)
print()
