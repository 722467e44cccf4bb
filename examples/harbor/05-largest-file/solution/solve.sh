#!/bin/bash
set -e
file="$(find data -type f | while read -r f; do echo "$(wc -c < "$f") $f"; done | sort -n | tail -1 | cut -d" " -f2)"
mv "$file" largest
