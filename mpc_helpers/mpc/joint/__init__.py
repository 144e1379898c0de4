"""Joint noise: drawn by three helpers together, known to none, and proven by each to the other two (JOINT.md).

- `circuit`: the coins of a bucket as AND and XOR gates
- `streams`: what two parties draw in common
- `layout`: how gates and numbers are laid out, and what each message weighs
- `conversion`: from shared bits to shared numbers
- `proof`: one round, two verifiers
- `noise`: the program of one party
"""
