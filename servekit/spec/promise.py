"""`promise`: a call under way as an argument of another one."""

from typing import TypeVar, cast

from servekit.spec.descriptor import Call

T = TypeVar("T")


def promise(call: Call[T]) -> T:
    """Stand for the result of a call, in the arguments of another one.

    The replica that takes the other call makes this one, and has its result from whoever makes it,
    not by way of the caller. So this call begins when the other does, ends with it, and is neither
    awaited nor passed on a second time.

    Args:
        call: What `.remote(…)` returned, and nobody has awaited.

    Returns:
        The call itself, with the type of its result.
    """
    return cast("T", call)
