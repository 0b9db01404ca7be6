"""The largest number of pairs that fits into a memory."""

from __future__ import annotations

from collections.abc import Callable


def largest_fitting(memory: Callable[[int], int], limit: int, first: int, most: int) -> int:
    """The largest n up to `most` with `memory(n) <= limit`, or 0.

    Memory is nearly linear in the number of pairs, so a line through the last two points guesses the
    next one. Every second guess halves the interval, in case it is not.

    Args:
        memory: grows with n; computed for few n.
        limit: in the unit of `memory`.
        first: tried first.
        most: largest number to be tried.
    """
    fits, too_large, n = 0, most + 1, min(first, most)
    points: list[tuple[int, int]] = []
    while too_large - fits > 1:
        points.append((n, memory(n)))
        if points[-1][1] <= limit:
            fits = n
        else:
            too_large = n
        guess = (fits + too_large) // 2
        if len(points) == 1:
            guess = 2 * n if fits == n else n // 2
        elif len(points) % 2 == 0 or too_large - fits < 4:
            (a, memory_a), (b, memory_b) = points[-2:]
            slope = (memory_b - memory_a) / (b - a)
            guess = int(b + (limit - memory_b) / slope) if slope > 0 else guess
            guess += guess == fits
        n = min(max(guess, fits + 1), too_large - 1)
    return fits
