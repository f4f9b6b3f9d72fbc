"""Inside one replica: loading the service, running its endpoints, batching, draining."""
