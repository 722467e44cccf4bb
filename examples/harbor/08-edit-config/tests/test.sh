#!/bin/bash
check() (
set -e
python3 - <<'END'
import json
assert json.load(open('config.json')) == {
    'server': {'host': 'localhost', 'port': 1893, 'debug': False},
    'name': 'kite'}
END
)
# Not in a condition, where `set -e` would have no effect.
check
[ $? = 0 ] && done=1 || done=0
echo "{\"reward\": $done}" > /logs/verifier/reward.json
