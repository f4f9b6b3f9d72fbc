"""Ray Serve's view of a deployment, passed on to `discovery.py`.

Ray Serve pickles this class by value, with what it refers to. So it holds nothing, and asks for the
module that a process has imported only when it is called.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class Follower(RequestRouter):
    """A `RequestRouter` through which no request but a wake-up ever goes."""

    def initialize_state(self, **kwargs: str) -> None:
        """Take the `request_router_kwargs`: an app, and a deployment of it."""
        self._key = kwargs["app"], kwargs["deployment"]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,  # noqa: ARG002
    ) -> list[list[RunningReplica]]:
        """Rank all alike."""
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take all replicas that run; called on a thread of Ray's."""
        from servekit.engine.ray.discovery import heard  # noqa: PLC0415

        super().update_replicas(replicas)
        heard(*self._key, replicas)
