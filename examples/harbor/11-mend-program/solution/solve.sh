#!/bin/bash
set -e
cat > price.py <<'END'
import sys


def price(amount):
    # 3 each; above 62 pieces, each further one costs 1
    if amount < 62:
        return amount * 3
    return 62 * 3 + amount - 62


for line in sys.stdin:
    print(price(int(line)))
END
