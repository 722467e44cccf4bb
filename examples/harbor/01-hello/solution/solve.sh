#!/bin/bash
set -e
echo ember > hello.txt
