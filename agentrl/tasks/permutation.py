"""`Permutation`: a shuffled order of n things, of which each place is computed on its own.

A list of n shuffled numbers would have to be held, and made again for each epoch. Here nothing is
held: a Feistel network (M. Luby and C. Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", SIAM J. Comput. 17, 1988) permutes the numbers below a power of four, and a
number that is too large is permuted again until it is not (cycle walking: J. Black and P. Rogaway,
"Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from dataclasses import dataclass
from hashlib import blake2b

_FEISTEL_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Permutation:
    """An order of the numbers below `size` that depends on `seed` alone."""

    size: int
    seed: int

    def __getitem__(self, place: int) -> int:
        """The number at `place`, both from 0 to `size` - 1.

        Raises:
            IndexError: there is no such place.
        """
        if not 0 <= place < self.size:
            raise IndexError(f"place {place} of {self.size}")
        bits = max(1, ((self.size - 1).bit_length() + 1) // 2)  # of each half
        # At most three in four numbers are too large, so a few rounds suffice on average. Each
        # number ends at another one, because the network itself permutes.
        while True:
            place = self._mix_halves(place, bits)
            if place < self.size:
                return place

    def _mix_halves(self, number: int, bits: int) -> int:
        left, right = number >> bits, number & ((1 << bits) - 1)
        for turn in range(_FEISTEL_ROUNDS):
            digest = blake2b(b"%d/%d/%d" % (self.seed, turn, right), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & ((1 << bits) - 1))
        return left << bits | right
