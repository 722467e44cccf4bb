import sys


def price(amount):
    # 3 each; above 62 pieces, each further one costs 1
    if amount < 62:
        return amount * 3
    return 62 * 3 + amount


for line in sys.stdin:
    print(price(line))
