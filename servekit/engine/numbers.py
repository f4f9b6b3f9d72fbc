"""How many replicas a service may have: its policy, and what an operator says in place of it."""

from collections.abc import Mapping

import msgspec

from servekit.errors import ConfigError, NotFound, suggest
from servekit.spec.app import ServiceSpec
from servekit.spec.policy import Autoscale

DEFAULT_TARGET_ONGOING = 10.0


def initial(policy: int | Autoscale) -> int:
    """Return how many replicas a service starts with."""
    return policy.start if isinstance(policy, Autoscale) else policy


def bounded(policy: int | Autoscale, number: int) -> int:
    """Return the number of replicas that a policy allows and that is closest to another one."""
    if isinstance(policy, Autoscale):
        return min(max(number, policy.min), policy.max)
    return policy


def bounds(policy: int | Autoscale) -> str:
    """Return a policy in few characters: `1..4`, or `2`."""
    return f"{policy.min}..{policy.max}" if isinstance(policy, Autoscale) else str(policy)


def resize(
    policies: Mapping[str, int | Autoscale], wanted: Mapping[str, int | tuple[int, int]]
) -> dict[str, int | Autoscale]:
    """Return the policies of some services, with other numbers.

    Args:
        policies: What holds now, of all services.
        wanted: By service: a number, or the least and the most.

    Raises:
        NotFound: There is no such service.
        ConfigError: A service takes the other of the two.
        SpecError: The bounds are none.
    """
    for name in wanted:
        if name not in policies:
            raise NotFound(
                f"no service {name!r} runs here.{suggest(name, [*policies])}", started=False
            )
    return {name: resized(policies[name], number, name=name) for name, number in wanted.items()}


def resized(
    policy: int | Autoscale, wanted: int | tuple[int, int], *, name: str
) -> int | Autoscale:
    """Return a policy with another number, or other bounds where the load decides.

    Args:
        policy: What holds now.
        wanted: A number, or the least and the most.
        name: The service's name.

    Raises:
        ConfigError: The service takes the other of the two.
        SpecError: The bounds are none.
    """
    if isinstance(policy, Autoscale):
        if isinstance(wanted, int):
            raise ConfigError(
                f"{name} follows its load from {policy.min} to {policy.max} replicas; move "
                f"its bounds, {name}={policy.min}..{max(wanted, policy.min)}, or pin it, "
                f"{name}={wanted}..{wanted}"
            )
        low, high = wanted
        return msgspec.structs.replace(policy, min=low, max=high, initial=None)
    if not isinstance(wanted, int):
        raise ConfigError(
            f"{name} has a fixed number of replicas, {policy}; write {name}={wanted[1]}, or "
            "let its code say replicas=sk.Autoscale(…)"
        )
    if wanted < 1:
        raise ConfigError(
            f"{name}={wanted}: must be 1 or more; a service that may sleep has "
            "replicas=sk.Autoscale(min=0, max=…)"
        )
    return wanted


def default_target(spec: ServiceSpec) -> float:
    """Return the calls on board that one replica should have when the policy does not say."""
    sizes = [e.batch.max_size for e in spec.endpoints if e.batch is not None]
    if sizes:
        return float(max(sizes))
    return float(spec.limits.max_ongoing or DEFAULT_TARGET_ONGOING)
