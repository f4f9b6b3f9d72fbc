"""The durable queue behind `@task`: what a job is, and where jobs are kept."""
