#!/bin/bash
set -e
sort -n -u one.txt two.txt | grep -v -x -F -f not.txt > merged.txt
