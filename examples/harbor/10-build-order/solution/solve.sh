#!/bin/bash
set -e
python3 - <<'END'
from graphlib import TopologicalSorter
rows = [line.split(':') for line in open('needs.txt')]
needs = {name: before.split() for name, before in rows}
order = TopologicalSorter(needs).static_order()
print(*order, sep='\n', file=open('order.txt', 'w'))
END
