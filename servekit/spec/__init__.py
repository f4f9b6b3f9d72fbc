"""Describing an app: classes become services, services a graph, the graph an `AppSpec`."""
