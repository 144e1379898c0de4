"""Agree and Spend: the commit protocol between the three helpers, without a coordinator (COMMIT.md).

- `messages`: the messages between helpers: one encoding each, every message signed
- `negotiation`: the in-memory state of one agreement, and how an agreement can fail
- `peers`: signed exchanges with both peers, protection against ledgers that roll back, the shared `Context`
- `voting`: phase two: vote, release, renounce, abort; polling for the outcome
- `preparation`: phase one: propose, collect, check, reserve
- `agreement`: both phases as the helper calls them, and the handling of peers' messages
"""
