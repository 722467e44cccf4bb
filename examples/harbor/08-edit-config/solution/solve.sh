#!/bin/bash
set -e
python3 - <<'END'
import json
config = json.load(open('config.json'))
config['server'] |= {'port': 1893, 'debug': False}
del config['old']
json.dump(config, open('config.json', 'w'))
END
