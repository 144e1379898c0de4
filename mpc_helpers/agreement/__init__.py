"""Agree and Spend: what three helpers say to each other before an answer is released.

- `messages`: what they say: one encoding each, every message signed
- `errors`: how an agreement can fail
- `parties`: the three, as one of them sees them: what it signs with, whose signatures it believes
- `hooks`: what tests put in place of the real thing, and the pace of repeats
- `peers`: the two peers, and how far each one's ledger had come
- `negotiation`: what one helper holds in memory while it agrees
- `negotiations`: all of those under way
- `surroundings`: what the parts below share
- `ballots`: what a helper says about an attempt, and what it believes of a peer's word
- `asking`: asking for ever about what was voted for
- `voting`: from the vote to the release, or to reports that are free again
- `reception`: what peers say, taken in and answered
- `checker`: whether the numbers of the reports are valid, as three helpers find out together
- `negotiator`: from a batch that each admitted to one attempt that all three reserved
- `agreement`: all of it, as the helper's page calls it
"""
