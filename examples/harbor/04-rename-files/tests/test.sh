#!/bin/bash
check() (
set -e
[ "$(cat notes/inlet.txt)" = "inlet 0" ]
[ "$(cat notes/flint.txt)" = "flint 1" ]
[ "$(cat notes/cedar.txt)" = "cedar 2" ]
[ "$(cat notes/larch.txt)" = "larch 3" ]
[ "$(cat notes/ember.txt)" = "ember 4" ]
[ "$(cat notes/grove.txt)" = "grove 5" ]
[ "$(ls notes | wc -l)" -eq 6 ]
)
# Not in a condition, where `set -e` would have no effect.
check
[ $? = 0 ] && done=1 || done=0
echo "$done" > /logs/verifier/reward.txt
