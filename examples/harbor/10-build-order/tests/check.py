rows = [line.split(':') for line in open('/tests/needs.txt')]
needs = {name: set(before.split()) for name, before in rows}
built = []
for part in open('order.txt').read().split():
    assert needs[part] <= set(built), part
    built.append(part)
assert sorted(built) == sorted(needs)
