"""What one helper remembers for good: which reports are spent, and every attempt to spend them."""
