#!/bin/bash
set -e
for file in notes/*.TXT; do mv "$file" "${file%.TXT}.txt"; done
