#!/bin/bash
check() (
set -e
[ "$(cat sum.txt)" -eq 16147 ]
)
# Not in a condition, where `set -e` would have no effect.
check
[ $? = 0 ] && done=1 || done=0
echo "$done" > /logs/verifier/reward.txt
