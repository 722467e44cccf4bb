#!/bin/bash
set -e
grep -c '^amber' log.txt > count.txt
