#!/bin/bash
check() (
set -e
[ "$(wc -c < largest)" -eq 3922 ]
[ ! -e data/c/delta ]
[ "$(find data -type f | wc -l)" -eq 8 ]
)
# Not in a condition, where `set -e` would have no effect.
check
[ $? = 0 ] && done=1 || done=0
echo "$done" > /logs/verifier/reward.txt
