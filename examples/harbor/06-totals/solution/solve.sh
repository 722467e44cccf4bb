#!/bin/bash
set -e
awk '{ sum[$1] += $2 } END { for (name in sum) print name, sum[name] }' orders.txt | sort > totals.txt
