"""Load generators, reports, and the simulation that plans a fleet on a virtual clock."""
