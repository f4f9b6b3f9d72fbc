"""Print the primes below a number, by the sieve of Eratosthenes."""

import sys
from math import isqrt


def primes(limit: int) -> list[int]:
    is_prime = bytearray([1]) * limit
    is_prime[:2] = b"\0\0"
    for number in range(2, isqrt(limit) + 1):
        if is_prime[number]:
            is_prime[number * number :: number] = bytes(len(is_prime[number * number :: number]))
    return [number for number in range(limit) if is_prime[number]]


if __name__ == "__main__":
    print(*primes(int(sys.argv[1])), sep="\n")
