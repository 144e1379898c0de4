"""Messages and connections from unauthenticated senders, bounded before they are trusted.

- `json_message`: parse JSON strictly, with errors that name the field
- `listening`: a TLS listener with connection limits, eviction and rate-limited logs
"""
