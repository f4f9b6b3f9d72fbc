"""Running an app: processes, routing tables, scaling, placement; on this machine, later on Ray."""
