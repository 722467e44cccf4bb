#!/bin/bash
set -e
awk -F, 'NR > 1 { sum += $2 } END { print sum }' sales.csv > sum.txt
