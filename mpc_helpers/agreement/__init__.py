"""Agree and Spend: what three helpers say to each other before an answer is released.

- `messages`: what they say: one encoding each, every message signed
- `peers`: the two peers, and how far each one's ledger had come
- `negotiation`: what one helper holds in memory while it agrees
- `agreement`: from a batch that each admitted to one attempt that all three reserved
- `voting`: from the vote to the release, or to reports that are free again
"""
