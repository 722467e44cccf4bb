sort -k 2
