"""Agree and Spend: what three helpers say to each other before an answer is released."""
