#!/bin/bash
set -e
tr 'A-Z' 'a-z' < text.txt | tr -c 'a-z' '\n' | grep . | sort | uniq -c | sort -rn | head -4 | awk '{ print $1, $2 }' > top.txt
