"""For tests of services, and of what calls them: the graph in this process, and a faulty network.

`local` runs a service and all that it needs in this process. `FaultProxy` stands between a client
and a server and does to their bytes what networks do: delays, cuts, silence, garbage.
"""

from servekit.engine.inprocess import local
from servekit.testing.faults import Bandwidth, Corrupt, Cut, Delay, Fault, Freeze, Refuse, Slice
from servekit.testing.proxy import Applied, FaultProxy, Statistics

__all__ = [
    "Applied",
    "Bandwidth",
    "Corrupt",
    "Cut",
    "Delay",
    "Fault",
    "FaultProxy",
    "Freeze",
    "Refuse",
    "Slice",
    "Statistics",
    "local",
]
