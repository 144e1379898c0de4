"""Joint noise: drawn by three helpers together, known to none, and proven by each to the other two (JOINT.md).

- `circuit`: the coins of a bucket as AND and XOR gates
- `layout`: how gates and numbers are laid out, the size of each message, and the streams that two parties share
- `noise`: the program of one party, and the conversion from shared bits to shared numbers
- `proof`: one round, two verifiers
"""
